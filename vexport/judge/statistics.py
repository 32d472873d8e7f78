"""Statistics of paired outcomes: pure functions of counts and arrays.

Notation: `wins` is the number of documents that went from wrong to right, and `losses` the number
that went from right to wrong. The difference is (wins - losses) / documents. Each end of an
interval has the one-sided error `alpha`. The two-sided confidence of an interval (low, high) is
therefore 1 - 2 * alpha.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from vexport.judge.resampling import bca_bounds, resampled_ratio
from vexport.scores.aggregates import Scores

POWER = 0.8
"""Probability that a planned number of documents settles the question (the usual 80 %)."""

Clusters = NDArray[np.intp]

MIN_CLUSTERS = 10
"""Minimum number of clusters (the tasks of a group, such as subjects).

Fewer clusters do not show the spread between clusters. With fewer clusters, documents are treated
as independent.
"""


class Interval(NamedTuple):
    """Two one-sided bounds."""

    low: float
    high: float


def normal_quantile(alpha: float) -> float:
    """Return the value that a standard normal variable exceeds with probability `alpha`."""
    return -float(special.ndtri(alpha))


def normal_tail(value: float) -> float:
    """Return the probability that a standard normal variable exceeds `value`."""
    return float(special.ndtr(-value))


def student_quantile(alpha: float, freedom: float) -> float:
    """Return the value that Student's t exceeds with probability `alpha`."""
    return -float(special.stdtrit(freedom, alpha))


def tango_statistic(wins: float, losses: float, documents: float, difference: float) -> float:
    """Return Tango's score statistic of H0: the true difference is `difference`.

    The statistic is approximately standard normal under H0 (Statistics in Medicine 17, 1998). It
    scales with sqrt(k) if all counts scale with k, so the counts need not be integers. If
    `difference` is -1 or 1, the variance under H0 is 0, and the statistic is infinite or 0.
    """
    if documents <= 0 or min(wins, losses) < 0 or wins + losses > documents:
        raise ValueError(f"paired counts: got wins {wins}, losses {losses}, documents {documents}")
    numerator = wins - losses - documents * difference
    variance = documents * _null_variance(wins, losses, documents, difference)
    if variance <= 0:
        return math.copysign(math.inf, numerator) if numerator else 0.0
    return numerator / math.sqrt(variance)


def _null_variance(wins: float, losses: float, documents: float, difference: float) -> float:
    """Return the variance of a document's gain under H0 (Tango's restricted maximum likelihood)."""
    a = 2 * documents
    b = -wins - losses + (2 * documents - wins + losses) * difference
    c = -losses * difference * (1 - difference)
    p_loss = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    return 2 * p_loss + difference * (1 - difference)


@lru_cache(maxsize=1 << 12)
def tango_interval(wins: float, losses: float, documents: float, alpha: float) -> Interval:
    """Return Tango's score interval: all differences that Tango's test at `alpha` does not reject.

    With wins = losses = 0, the interval is +-z^2 / (documents + z^2). Wald's interval would have
    the width 0.
    """
    z = normal_quantile(alpha)
    estimate = (wins - losses) / documents

    def excess(difference: float, sign: int) -> float:
        return sign * tango_statistic(wins, losses, documents, difference) - z

    low = -1.0 if estimate <= -1 else optimize.bisect(excess, -1.0, estimate, args=(1,), xtol=1e-12)
    high = 1.0 if estimate >= 1 else optimize.bisect(excess, estimate, 1.0, args=(-1,), xtol=1e-12)
    return Interval(float(low), float(high))


def wilson_interval(successes: float, trials: float, alpha: float) -> Interval:
    """Return Wilson's score interval of a proportion (JASA 22, 1927)."""
    z = normal_quantile(alpha)
    centre = successes + z * z / 2
    spread = z * math.sqrt(successes * (trials - successes) / trials + z * z / 4)
    low, high = ((centre + side) / (trials + z * z) for side in (-spread, spread))
    return Interval(0.0 if successes == 0 else low, 1.0 if successes == trials else high)


def recovery_interval(both: int, wins: int, losses: int, alpha: float) -> Interval:
    """Return the interval of candidate / baseline accuracy.

    The baseline must have at least one correct response (`both` + `losses` > 0). The interval is
    Bonett and Price's hybrid of two Wilson intervals, for a ratio of paired proportions (Statistics
    in Medicine 25, 2006). `both` is the number of documents with a correct response of both models.
    """
    candidate, baseline, total = both + wins, both + losses, both + wins + losses
    spread = math.sqrt((wins + losses + 2) / ((candidate + 1) * (baseline + 1)))
    parts = sum(math.sqrt((1 - (x + 1) / (total + 2)) / (x + 1)) for x in (candidate, baseline))
    z = normal_quantile(alpha) * spread / parts
    tail = normal_tail(z)
    numerator, denominator = (wilson_interval(x, total, tail) for x in (candidate, baseline))
    return Interval(numerator.low / denominator.high, numerator.high / denominator.low)


def bca_interval(values: Scores, alpha: float, sizes: Scores | None = None) -> Interval:
    """Return seeded BCa bootstrap bounds of a mean (Efron 1987), as scipy computes them.

    `values` has the shape (documents,). With `sizes`, the bounds are those of sum(values) /
    sum(sizes), for clusters with these sums and sizes.
    """
    if sizes is None:
        mean = float(values.mean())
        resampled = resampled_ratio(values, np.ones(len(values)))
        return Interval(*bca_bounds(mean, resampled, values - mean, alpha))
    total, size = float(values.sum()), float(sizes.sum())
    without = (total - values) / (size - sizes)
    resampled = resampled_ratio(values, sizes)
    return Interval(*bca_bounds(total / size, resampled, without.mean() - without, alpha))


def bootstrap_interval(
    values: Scores, alpha: float, *, span: float, clusters: Clusters | None = None
) -> Interval:
    """Return bootstrap bounds of the mean of `values`, shape (documents,).

    With clusters, whole clusters are resampled. Resamples contain only values that occurred. If
    none of a few documents changed, the interval would have the width 0. Therefore the bounds are
    at least as far from the mean as Tango's bounds for no change, times `span` (the width of the
    metric's range).
    """
    mean = float(values.mean())
    quiet = tango_interval(0, 0, len(values), alpha)
    least = Interval(mean + span * quiet.low, mean + span * quiet.high)
    numbers = np.arange(len(values)) if clusters is None else clusters
    sums = np.bincount(numbers, weights=values).astype(np.float64)
    sizes = np.bincount(numbers).astype(np.float64)
    means = sums / sizes
    if np.ptp(means) <= 1e-12 * max(1.0, float(np.abs(means).max())):
        return least
    if clusters is None:
        low, high = bca_interval(values, alpha)
    else:
        ends = bca_interval(sums, alpha, sizes)
        low, high = (mean + math.sqrt(len(sums) / (len(sums) - 1)) * (end - mean) for end in ends)
    return Interval(min(low, least.low), max(high, least.high))


def student_interval(
    values: Scores, alpha: float, clusters: Clusters | None = None, *, is_uneven: bool
) -> Interval:
    """Return Student's bounds of the mean of `values`, shape (documents,).

    With clusters, the mean is treated as the ratio of the clusters' sums and sizes. `is_uneven` is
    explained in `student_reach`.
    """
    mean = float(values.mean())
    numbers = np.arange(len(values)) if clusters is None else clusters
    residuals = np.bincount(numbers, weights=values - mean).astype(np.float64)
    if len(residuals) < 2:
        return Interval(-math.inf, math.inf)
    many = len(residuals)
    error = math.sqrt(many / (many - 1) * float((residuals**2).sum())) / len(values)
    below, above = student_reach(residuals, alpha, is_uneven=is_uneven)
    return Interval(mean - below * error, mean + above * error)


def student_reach(influence: Scores, alpha: float, *, is_uneven: bool) -> tuple[float, float]:
    """Return how many standard errors Student's bounds are below and above a value.

    `influence` has the influence of each document on the value, up to a common factor, shape
    (documents,). If `is_uneven`, few documents may have most of the influence. The standard error
    of a sample without them is too small. Two corrections then move the bounds outwards:

    - The degrees of freedom are the effective number of documents, (sum of squares)^2 / (sum of
      fourth powers). It is Satterthwaite's number for terms with one degree of freedom each
      (Biometrics Bulletin 2, 1946).
    - The bound on the side of the longer tail moves by skewness / (6 sqrt(documents)) (1 + 2 t^2),
      the correction of Johnson (JASA 73, 1978).
    """
    many = len(influence)
    squares = influence**2
    if not is_uneven or not squares.any():
        quantile = student_quantile(alpha, max(1, many - 1))
        return quantile, quantile
    effective = float(squares.sum()) ** 2 / float((squares**2).sum())
    quantile = student_quantile(alpha, max(1.0, min(effective, many - 1)))
    skewness = float((influence**3).mean()) / float(squares.mean()) ** 1.5
    shift = skewness / (6 * math.sqrt(many)) * (1 + 2 * quantile**2)
    return quantile + max(0.0, -shift), quantile + max(0.0, shift)


def mean_statistic(values: Scores, against: float, span: float) -> float:
    """Return a test statistic of H0: the mean of `values` is `against`.

    The result is Student's statistic or Tango's statistic for no change, whichever is closer to 0.
    If `span` is 0, the result is Student's statistic. The statistic is used to plan the number of
    documents for tasks that `bootstrap_interval` decides, with the same `span`.
    """
    documents, distance = len(values), float(values.mean()) - against
    if span == 0:
        deviation = float(values.std(ddof=1)) if documents > 1 else 0.0
        return distance / deviation * math.sqrt(documents) if deviation else 0.0
    quiet = tango_statistic(0, 0, documents, max(-1.0, min(1.0, -distance / span)))
    if np.ptp(values) == 0:
        return quiet
    return min(quiet, distance / float(values.std(ddof=1)) * math.sqrt(documents), key=abs)


def documents_for_power(margin: float, disagreement: float, alpha: float) -> int:
    """Return how many documents Tango's test needs to rule out a loss above `margin`.

    With this number of documents, the test succeeds with probability POWER if the true loss is 0.

    The formula is ((z_alpha * s0 + z_beta * s1) / margin)^2 (Nam, Biometrics 53, 1997). s1^2 is
    `disagreement`, the share of documents that change between right and wrong. s0^2 is the variance
    if the loss equals the margin. Connor's formula (Biometrics 43, 1987) uses s1 for both. It
    returns far too few documents if the margin is larger than the disagreement.
    """
    null = _null_variance(disagreement / 2, disagreement / 2, 1, -margin)
    needed = _power_sum(alpha, math.sqrt(disagreement / null)) * math.sqrt(null) / margin
    return max(1, math.ceil(needed**2))


def documents_to_settle(
    documents: int, statistic: float, alpha: float, *, spread: float = 1.0
) -> int | None:
    """Return how many documents would settle an open question with probability POWER.

    The calculation assumes that further documents have the observed rates. `statistic` is the test
    statistic at the margin with the present `documents`. It grows with sqrt(documents). `spread` is
    the observed spread divided by the spread that the statistic assumes. Returns None if the
    statistic is 0: the observed difference is exactly the margin, and no number of documents
    settles the question.
    """
    if statistic == 0:
        return None
    return max(1, math.ceil(documents * (_power_sum(alpha, spread) / statistic) ** 2))


def spread_over_null(wins: float, losses: float, documents: float, margin: float) -> float:
    """Return the spread of a document's gain, divided by the spread in Tango's test at the margin.

    A few documents without a change do not show that no document changes. Therefore half a win,
    half a loss and two documents are added (Agresti and Min, Statistics in Medicine 24, 2005).
    """
    disagreement = (wins + losses + 1) / (documents + 2)
    variance = max(0.0, disagreement - ((wins - losses) / documents) ** 2)
    null = _null_variance(wins, losses, documents, -margin)
    return math.sqrt(variance / null) if null > 0 else 1.0


def _power_sum(alpha: float, spread: float) -> float:
    return normal_quantile(alpha) + float(special.ndtri(POWER)) * spread


def seeds_to_settle(documents: int, seeds: int, design: float, needed: float) -> int | None:
    """Return the number of responses per document that would settle the task.

    The number of documents stays at `documents`. `needed` is the number of documents that would
    settle the task with `seeds` responses each.

    The calculation uses the design effect 1 + (seeds - 1) * correlation of the responses to a
    document (Kish, Survey Sampling, 1965). Returns None if no number of responses to these
    documents is enough.
    """
    correlation = min(1.0, (design - 1) / (seeds - 1))
    worth = needed * seeds / design
    left = documents - worth * correlation
    return max(1, math.ceil(worth * (1 - correlation) / left)) if left > 0 else None


class ClusterCorrection(NamedTuple):
    """Corrections for clustered documents.

    Counts of documents are divided by `design`. Tests of the divided counts have the level `alpha`.
    """

    design: float
    alpha: float


def design_effect(gain: Scores, clusters: Clusters, responses: int = 1) -> float:
    """Return the clustered variance of the mean of `gain`, divided by its plain variance.

    The result is at least 1.

    `gain` and `clusters` have the shape (documents,), and clusters are numbered from 0. The
    clustered variance is K / (K - 1) * sum over clusters of (sum of residuals)^2 (Liang and Zeger,
    Biometrika 73, 1986).

    If the clusters are documents, `responses` is the number of responses per document, and `gain`
    and `clusters` have the shape (documents * responses,). A few changes do not show that the
    responses to a document change independently. Therefore the sums include one more document, with
    a change of all of its responses.
    """
    residuals = gain - gain.mean()
    added = responses if responses > 1 else 0
    plain = float((residuals**2).sum()) + added
    many = len(np.unique(clusters))
    if plain == 0 or many < 2:
        return float(responses)
    sums = np.bincount(clusters, weights=residuals)
    return max(1.0, many / (many - 1) * (float((sums**2).sum()) + added**2) / plain)


def cluster_correction(
    gain: Scores, clusters: Clusters | None, alpha: float, responses: int = 1
) -> ClusterCorrection:
    """Return the divisor for counts of documents, and the level at which to test the counts.

    Counts of clustered documents are divided by the design effect (Rao and Scott, Biometrics 48,
    1992). Counts without clusters are unchanged. The variance between K clusters is only an
    estimate. Therefore `alpha` is replaced by the normal tail beyond Student's quantile with K - 1
    degrees of freedom.
    """
    if clusters is None:
        return ClusterCorrection(1.0, alpha)
    freedom = max(1, len(np.unique(clusters)) - 1)
    tail = normal_tail(student_quantile(alpha, freedom))
    return ClusterCorrection(design_effect(gain, clusters, responses), tail)


def clustered_tango(
    gain: Scores, clusters: Clusters | None, alpha: float, responses: int = 1
) -> Interval:
    """Return Tango's score interval of gains of -1, 0 and 1, corrected for clusters."""
    correction = cluster_correction(gain, clusters, alpha, responses)
    wins, losses = (float((sign * gain > 0).sum()) / correction.design for sign in (1, -1))
    return tango_interval(wins, losses, len(gain) / correction.design, correction.alpha)
