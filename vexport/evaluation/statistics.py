"""Statistics of paired outcomes: pure functions of counts and arrays.

Notation: `wins` documents went from wrong to right, `losses` from right to wrong, among
`documents`; the difference is (wins - losses) / documents. `alpha` is the one-sided error of each
end of an interval, so that an interval (low, high) has the two-sided confidence 1 - 2 * alpha.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

Scores = NDArray[np.float64]

POWER = 0.8
"""Chance that a planned number of documents settles the question (the usual 80 %)."""

RESAMPLES = 9999
"""Bootstrap resamples: Monte Carlo error of a 5 % tail below 0.25 points (sqrt(.05 * .95 /
9999)).
"""
Clusters = NDArray[np.intp]

MIN_CLUSTERS = 10
"""Fewer subjects say nothing of the spread between subjects: their documents then count one by
one.
"""


class Interval(NamedTuple):
    """Two one-sided bounds."""

    low: float
    high: float


def tango_statistic(wins: float, losses: float, documents: float, difference: float) -> float:
    """Tango's score statistic of H0: the true difference is `difference` (Statistics in Medicine
    17, 1998).

    Approximately standard normal under H0. It scales with sqrt(k) when all counts scale with k, so
    the counts need not be integers. At the ends of [-1, 1], where H0 leaves no variance, it is
    infinite or 0.
    """
    if documents <= 0 or min(wins, losses) < 0 or wins + losses > documents:
        raise ValueError(f"paired counts: got wins {wins}, losses {losses}, documents {documents}")
    numerator = wins - losses - documents * difference
    variance = documents * _null_variance(wins, losses, documents, difference)
    if variance <= 0:
        return math.copysign(math.inf, numerator) if numerator else 0.0
    return numerator / math.sqrt(variance)


def _null_variance(wins: float, losses: float, documents: float, difference: float) -> float:
    """The variance of a document's gain under H0, by Tango's restricted maximum likelihood."""
    a = 2 * documents
    b = -wins - losses + (2 * documents - wins + losses) * difference
    c = -losses * difference * (1 - difference)
    p_loss = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    return 2 * p_loss + difference * (1 - difference)


def tango_interval(wins: float, losses: float, documents: float, alpha: float) -> Interval:
    """Tango's score interval of the difference: the values that the score test at `alpha` does not
    refuse.

    With wins = losses = 0 it is +-z^2 / (documents + z^2), where Wald's interval has no width.
    """
    z = float(stats.norm.isf(alpha))
    estimate = (wins - losses) / documents

    def excess(difference: float, sign: int) -> float:
        return sign * tango_statistic(wins, losses, documents, difference) - z

    low = -1.0 if estimate <= -1 else optimize.bisect(excess, -1.0, estimate, args=(1,), xtol=1e-12)
    high = 1.0 if estimate >= 1 else optimize.bisect(excess, estimate, 1.0, args=(-1,), xtol=1e-12)
    return Interval(float(low), float(high))


def wilson_interval(successes: float, trials: float, alpha: float) -> Interval:
    """Wilson's score interval of a proportion (JASA 22, 1927)."""
    z = float(stats.norm.isf(alpha))
    centre = successes + z * z / 2
    spread = z * math.sqrt(successes * (trials - successes) / trials + z * z / 4)
    low, high = ((centre + side) / (trials + z * z) for side in (-spread, spread))
    return Interval(0.0 if successes == 0 else low, 1.0 if successes == trials else high)


def mcnemar_p(wins: int, losses: int) -> float:
    """Exact two-sided McNemar test: binomial with p = 1/2 on the documents that changed; 1 where
    none did.
    """
    changed = wins + losses
    return float(stats.binomtest(losses, changed, 0.5).pvalue) if changed else 1.0


def permutation_p(gain: Scores) -> float:
    """Two-sided paired permutation test of a mean gain of 0, shape (documents,): signs flipped at
    random.

    Exact up to RESAMPLES draws (scipy); 1 where nothing changed, or one document: either sign is as
    extreme.
    """
    changed = gain[gain != 0]
    if len(changed) < 2:
        return 1.0
    result = stats.permutation_test(
        (changed,),
        lambda values, axis: values.mean(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, 4_000_000 // len(changed)),
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def recovery_interval(both: int, wins: int, losses: int, alpha: float) -> Interval:
    """Interval of candidate / baseline accuracy; the baseline has a right answer.

    Bonett and Price's hybrid of two Wilson intervals for a ratio of paired proportions (Statistics
    in Medicine 25, 2006). `both` counts the documents that both models answer right.
    """
    candidate, baseline, total = both + wins, both + losses, both + wins + losses
    spread = math.sqrt((wins + losses + 2) / ((candidate + 1) * (baseline + 1)))
    parts = sum(math.sqrt((1 - (x + 1) / (total + 2)) / (x + 1)) for x in (candidate, baseline))
    z = float(stats.norm.isf(alpha)) * spread / parts
    tail = float(stats.norm.sf(z))
    numerator, denominator = (wilson_interval(x, total, tail) for x in (candidate, baseline))
    return Interval(numerator.low / denominator.high, numerator.high / denominator.low)


def bca_interval(
    samples: tuple[Scores | Clusters, ...], statistic: Callable[..., Scores], alpha: float
) -> Interval:
    """BCa bootstrap bounds (Efron 1987, scipy) of a statistic of paired samples, shape
    (documents,), seeded.

    `statistic` takes the samples and an axis.
    """
    result = stats.bootstrap(
        samples,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, 4_000_000 // len(samples[0])),
        confidence_level=1 - 2 * alpha,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(float(result.low), float(result.high))


def bootstrap_interval(
    values: Scores, alpha: float, *, span: float, clusters: Clusters | None = None
) -> Interval:
    """Bootstrap bounds of the mean of `values`, shape (documents,); with clusters whole ones are
    resampled.

    A resample knows nothing of what a few documents did not show, so that the bounds are never
    nearer to the mean than Tango's for no change at all, times `span`, the width of the metric's
    range.
    """
    mean = float(values.mean())
    quiet = tango_interval(0, 0, len(values), alpha)
    least = Interval(mean + span * quiet.low, mean + span * quiet.high)
    numbers = np.arange(len(values)) if clusters is None else clusters
    sums, sizes = np.bincount(numbers, weights=values), np.bincount(numbers)
    means = sums / sizes
    if np.ptp(means) <= 1e-12 * max(1.0, float(np.abs(means).max())):
        return least
    if clusters is None:
        low, high = bca_interval((values,), np.mean, alpha)
    else:
        ends = bca_interval(
            (sums, sizes), lambda total, size, axis: total.sum(axis) / size.sum(axis), alpha
        )
        low, high = (mean + math.sqrt(len(sums) / (len(sums) - 1)) * (end - mean) for end in ends)
    return Interval(min(low, least.low), max(high, least.high))


def mean_statistic(values: Scores, against: float, span: float) -> float:
    """The weaker of Student's statistic of H0, the mean of `values` is `against`, and Tango's for
    no change.

    It plans documents where `bootstrap_interval` decides, with the same `span`.
    """
    documents, distance = len(values), float(values.mean()) - against
    quiet = tango_statistic(0, 0, documents, max(-1.0, min(1.0, -distance / span)))
    if np.ptp(values) == 0:
        return quiet
    return min(quiet, distance / float(values.std(ddof=1)) * math.sqrt(documents), key=abs)


def documents_for_power(margin: float, disagreement: float, alpha: float) -> int:
    """Documents with which Tango's test shows no loss beyond `margin` with chance POWER, if there
    is none.

    ((z_alpha * s0 + z_beta * s1) / margin)^2 (Nam, Biometrics 53, 1997): s1^2 is `disagreement`,
    the share of documents whose correctness changes, and s0^2 the variance if the loss is the
    margin. With s1 for both (Connor, Biometrics 43, 1987) a margin above the disagreement gets far
    too few documents.
    """
    null = _null_variance(disagreement / 2, disagreement / 2, 1, -margin)
    needed = _power_sum(alpha, math.sqrt(disagreement / null)) * math.sqrt(null) / margin
    return max(1, math.ceil(needed**2))


def documents_to_settle(
    documents: int, statistic: float, alpha: float, *, spread: float = 1.0
) -> int | None:
    """Documents that would settle an open question with probability POWER, if the observed rates
    hold.

    `statistic` is the test statistic at the margin with `documents`; it grows with sqrt(documents).
    `spread` is the observed spread over the one that the statistic has. None where the statistic is
    0: the observed difference lies on the margin and no number settles it.
    """
    if statistic == 0:
        return None
    return max(1, math.ceil(documents * (_power_sum(alpha, spread) / statistic) ** 2))


def spread_over_null(wins: float, losses: float, documents: float, margin: float) -> float:
    """The spread of a document's gain, over the one that Tango's test takes if the loss is the
    margin.

    Few documents without a change do not show that none changes: half a win and half a loss are
    added, and two documents (Agresti and Min, Statistics in Medicine 24, 2005).
    """
    disagreement = (wins + losses + 1) / (documents + 2)
    variance = max(0.0, disagreement - ((wins - losses) / documents) ** 2)
    null = _null_variance(wins, losses, documents, -margin)
    return math.sqrt(variance / null) if null > 0 else 1.0


def _power_sum(alpha: float, spread: float) -> float:
    return float(stats.norm.isf(alpha)) + float(stats.norm.ppf(POWER)) * spread


def seeds_to_settle(documents: int, seeds: int, design: float, needed: float) -> int | None:
    """Answers a document that would settle what `needed` documents with `seeds` answers each would.

    By the design effect 1 + (seeds - 1) * correlation of answers to one document (Kish, Survey
    Sampling, 1965). None where no number of answers to these documents is worth as much.
    """
    correlation = min(1.0, (design - 1) / (seeds - 1))
    worth = needed * seeds / design
    left = documents - worth * correlation
    return max(1, math.ceil(worth * (1 - correlation) / left)) if left > 0 else None


class Effective(NamedTuple):
    """The worth of clustered documents: counts divided by `design`, tested at `alpha`."""

    design: float
    alpha: float


def design_effect(gain: Scores, clusters: Clusters, answers: int = 1) -> float:
    """Clustered over plain variance of the mean of `gain`, shape (documents,), at least 1.

    The clustered one is K / (K - 1) * sum over clusters of (sum of residuals)^2 (Liang and Zeger,
    Biometrika 73, 1986); `clusters` has the shape (documents,) and numbers from 0. Where documents
    are the clusters, with so many `answers` to each, few changes do not show that the answers to
    one document change apart from each other: one document whose answers all change is added.
    """
    residuals = gain - gain.mean()
    added = answers if answers > 1 else 0
    plain = float((residuals**2).sum()) + added
    many = len(np.unique(clusters))
    if plain == 0 or many < 2:
        return float(answers)
    sums = np.bincount(clusters, weights=residuals)
    return max(1.0, many / (many - 1) * (float((sums**2).sum()) + added**2) / plain)


def effective(gain: Scores, clusters: Clusters | None, alpha: float, answers: int = 1) -> Effective:
    """The factor that shrinks counts (Rao and Scott, Biometrics 48, 1992); unclustered ones stay.

    The variance between K clusters is an estimate too: `alpha` becomes the normal tail at Student's
    point with K - 1 degrees of freedom.
    """
    if clusters is None:
        return Effective(1.0, alpha)
    freedom = max(1, len(np.unique(clusters)) - 1)
    tail = float(stats.norm.sf(stats.t.isf(alpha, freedom)))
    return Effective(design_effect(gain, clusters, answers), tail)


def clustered_tango(
    gain: Scores, clusters: Clusters | None, alpha: float, answers: int = 1
) -> Interval:
    """Tango's score interval of gains of -1, 0 and 1, on the counts that clustered documents are
    worth.
    """
    worth = effective(gain, clusters, alpha, answers)
    wins, losses = (float((sign * gain > 0).sum()) / worth.design for sign in (1, -1))
    return tango_interval(wins, losses, len(gain) / worth.design, worth.alpha)
