"""Intervals of a pair's difference and scores, and the numbers that would settle its outcome."""

import math
from typing import NamedTuple

from vexport.judge.pairs import TaskPair
from vexport.judge.statistics import (
    Interval,
    bootstrap_interval,
    cluster_correction,
    clustered_tango,
    documents_to_settle,
    mean_statistic,
    recovery_interval,
    seeds_to_settle,
    spread_over_null,
    student_interval,
    tango_statistic,
    wilson_interval,
)
from vexport.records import Estimate, Needed
from vexport.scores.aggregates import Scores


class Levels(NamedTuple):
    """The margin of a decision, and the levels of its lower bound and of its upper bound."""

    margin: float
    alpha: float
    fail_alpha: float


def difference_interval(pair: TaskPair, alpha: float) -> Interval:
    """Return one-sided 1 - alpha bounds of the mean gain.

    For 0/1 metrics, the bounds are Tango's score interval. For other metrics, they are a bootstrap
    interval. Both take clusters into account.
    """
    if pair.corpus is not None:
        return pair.corpus.difference_interval(alpha)
    if pair.binary:
        return clustered_tango(pair.gain, pair.clusters, alpha, pair.responses_per_cluster)
    return _mean_interval(pair, pair.gain, alpha)


def _mean_interval(pair: TaskPair, values: Scores, alpha: float) -> Interval:
    """Return bounds of the mean of values, shape (responses,), by a bootstrap.

    For metrics of a whole corpus, each bound is the wider of the bootstrap's and Student's.
    """
    bounds = bootstrap_interval(values, alpha, span=pair.range_width, clusters=pair.clusters)
    if not pair.is_joined_corpus:
        return bounds
    is_uneven = any(part.corpus and part.corpus.table.is_uneven for part in pair.parts)
    student = student_interval(values, alpha, pair.clusters, is_uneven=is_uneven)
    return Interval(min(bounds.low, student.low), max(bounds.high, student.high))


def score_of(pair: TaskPair, scores: Scores, alpha: float) -> Estimate:
    """Return the score of one of the two models, whose `scores` are a field of the pair."""
    value = float(scores.mean())
    if pair.corpus is not None:
        side = 0 if scores is pair.baseline else 1
        value = pair.corpus.reported[side]
        low, high = pair.corpus.shown_interval(side, alpha)
    elif pair.binary:
        correction = cluster_correction(scores, pair.clusters, alpha, pair.responses_per_cluster)
        right, trials = float(scores.sum()) / correction.design, len(scores) / correction.design
        low, high = wilson_interval(right, trials, correction.alpha)
    else:
        ends = _mean_interval(pair, scores, alpha)
        value = pair.to_aggregate(value)
        low, high = sorted(pair.to_aggregate(end) for end in ends)
    return Estimate(value=value, low=low, high=high)


def recovery_of(pair: TaskPair, difference: Interval, alpha: float) -> Estimate | None:
    """Return candidate / baseline. `difference` has the bounds of the difference.

    For 0/1 metrics without clusters, the bounds are Bonett and Price's. For other metrics, a bound
    is 1 + (bound of the difference) / (baseline's mean). The result is None if the baseline's mean
    is not positive, if lower is better, or if differences are in nats.
    """
    baseline, candidate = float(pair.baseline.mean()), float(pair.candidate.mean())
    if baseline <= 0 or pair.sign < 0 or pair.unit.startswith("nats"):
        return None
    low, high = 1 + difference.low / baseline, 1 + difference.high / baseline
    if pair.binary and pair.clusters is None:
        both = int((pair.baseline * pair.candidate).sum())
        low, high = recovery_interval(both, pair.wins, pair.losses, alpha)
    return Estimate(value=candidate / baseline, low=low, high=high)


def needed_to_settle(pair: TaskPair, levels: Levels) -> Needed | None:
    """Return the documents and seeds that would settle the task, None if no number would."""
    documents, spread = len(pair.gain), 1.0
    if pair.binary:
        statistic = tango_statistic(pair.wins, pair.losses, documents, -levels.margin)
        spread = spread_over_null(pair.wins, pair.losses, documents, levels.margin)
    else:
        statistic = mean_statistic(pair.gain, -levels.margin, pair.range_width)
    level = levels.alpha if statistic > 0 else levels.fail_alpha
    correction = cluster_correction(pair.gain, pair.clusters, level, pair.responses_per_cluster)
    needed = documents_to_settle(
        documents, statistic / correction.design**0.5, correction.alpha, spread=spread
    )
    if needed is None:
        return None
    needed = math.ceil(needed / pair.seeds)
    seeds = None
    if (responses := pair.responses_per_cluster) > 1:
        seeds = seeds_to_settle(documents // responses, responses, correction.design, needed)
    return Needed(documents=needed, seeds=seeds, available=pair.available)
