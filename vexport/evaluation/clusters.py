"""Documents that are clustered: the subjects of a group of tasks, as MMLU's 57.

A model that loses on one subject's documents may lose on all of them, so that n documents of K subjects say
less than n documents that were drawn one by one (Miller, "Adding error bars to evals", 2024, section 2.2).
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from vexport.evaluation.statistics import RESAMPLES, Interval, Scores, normal_quantile, tango_interval

Clusters = NDArray[np.intp]

MIN_CLUSTERS = 10
"""Fewer subjects say nothing of the spread between subjects: their documents then count one by one."""


class Effective(NamedTuple):
    """What clustered documents are worth: counts divided by `design`, tested at `alpha`."""

    design: float
    alpha: float


def design_effect(gain: Scores, clusters: Clusters) -> float:
    """Clustered over plain variance of the mean of `gain`, shape (documents,), at least 1.

    The clustered one is K / (K - 1) * sum over clusters of (sum of residuals)^2 (Liang and Zeger,
    Biometrika 73, 1986); `clusters` has the shape (documents,) and numbers from 0.
    """
    residuals = gain - gain.mean()
    plain = float((residuals**2).sum())
    if plain == 0:
        return 1.0
    sums = np.bincount(clusters, weights=residuals)
    many = len(np.unique(clusters))
    return max(1.0, many / (many - 1) * float((sums**2).sum()) / plain)


def effective(gain: Scores, clusters: Clusters, alpha: float) -> Effective:
    """How to shrink counts (Rao and Scott, Biometrics 48, 1992), with Student's K - 1 degrees of freedom.

    The variance between K clusters is an estimate too: `alpha` becomes the normal tail at Student's point.
    """
    many = len(np.unique(clusters))
    return Effective(design_effect(gain, clusters), float(stats.norm.sf(stats.t.isf(alpha, many - 1))))


def clustered_tango(gain: Scores, clusters: Clusters, alpha: float) -> Interval:
    """Tango's score interval of gains of -1, 0 and 1, on the counts that clustered documents are worth."""
    worth = effective(gain, clusters, alpha)
    wins, losses = (float((sign * gain > 0).sum()) / worth.design for sign in (1, -1))
    return tango_interval(wins, losses, len(gain) / worth.design, worth.alpha)


def clustered_bootstrap(
    values: Scores, clusters: Clusters, alpha: float, *, span: float, seed: int = 0
) -> Interval:
    """Bounds of the mean of `values` by a bootstrap of whole clusters (BCa, scipy), seeded.

    Never nearer to the mean than Tango's for no change at all, times `span`, the width of the metric's range.
    """
    normal_quantile(alpha)
    mean = float(values.mean())
    quiet = tango_interval(0, 0, len(values), alpha)
    least = Interval(mean + span * quiet.low, mean + span * quiet.high)
    sums, sizes = np.bincount(clusters, weights=values), np.bincount(clusters)
    means = sums / sizes
    if np.ptp(means) <= 1e-12 * max(1.0, float(np.abs(means).max())):
        return least
    result = stats.bootstrap(
        (sums, sizes),
        lambda total, size, axis: total.sum(axis) / size.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=1 - 2 * alpha,
        method="BCa",
        rng=np.random.default_rng(seed),
    )
    widening = math.sqrt(len(sums) / (len(sums) - 1))
    low, high = (mean + widening * (float(end) - mean) for end in result.confidence_interval)
    return Interval(min(low, least.low), max(high, least.high))
