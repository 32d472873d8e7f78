"""The comparison of two models on one task: from scores to a TaskVerdict."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from scipy import stats

from vexport.evaluation.clusters import clustered_bootstrap, clustered_tango, effective
from vexport.evaluation.gates import Compared
from vexport.evaluation.pairs import TaskPair
from vexport.evaluation.statistics import (
    Interval,
    Scores,
    bootstrap_interval,
    documents_to_settle,
    mcnemar_p,
    mean_statistic,
    permutation_p,
    recovery_interval,
    spread_over_null,
    tango_interval,
    tango_statistic,
    wilson_interval,
)
from vexport.evaluation.unpaired import UnpairedTask
from vexport.types import Comparison, Flip, Outcome, Score, TaskVerdict

MAX_FLIPS = 50
"""Changed documents shown for each task: enough to read, few enough to print."""


def difference_interval(compared: Compared, alpha: float) -> Interval:
    """One-sided 1 - alpha bounds of the mean gain.

    Paired: Tango's score interval, or a bootstrap if not 0/1, over clusters where there are some.
    """
    if isinstance(compared, UnpairedTask):
        return compared.interval(alpha)
    if compared.clusters is not None:
        if compared.binary:
            return clustered_tango(compared.gain, compared.clusters, alpha)
        return clustered_bootstrap(compared.gain, compared.clusters, alpha, span=_span(compared))
    if compared.binary:
        return tango_interval(_wins(compared), _losses(compared), len(compared.gain), alpha)
    return bootstrap_interval(compared.gain, alpha, span=_span(compared))


def compare_task(
    compared: Compared, *, margin: float, alpha: float, fail_alpha: float, also: Sequence[Compared] = ()
) -> TaskVerdict:
    """Judge one task: PASS if the lower bound at `alpha` is above -margin, FAIL if the upper bound at
    `fail_alpha` is below it, else INCONCLUSIVE.

    `fail_alpha` is at most `alpha`, so that both cannot hold. `also` is shown next to it.
    """
    low, high = difference_interval(compared, alpha).low, difference_interval(compared, fail_alpha).high
    outcome = _outcome(low, high, margin)
    others = tuple(comparison(other, margin=margin, alpha=alpha) for other in also)
    needed = _needed(compared, margin, alpha, fail_alpha) if outcome == "INCONCLUSIVE" else None
    if isinstance(compared, UnpairedTask):
        return _unpaired_verdict(compared, outcome, Interval(low, high), needed, others, alpha)
    return _paired_verdict(compared, outcome, Interval(low, high), needed, others, alpha)


def comparison(compared: Compared, *, margin: float, alpha: float) -> Comparison:
    """A difference with its bounds, for show."""
    low, high = difference_interval(compared, alpha)
    old, new = _means(compared)
    return Comparison(
        task=compared.task,
        metric=compared.metric,
        filter=compared.filter,
        documents=_documents(compared),
        baseline=old,
        candidate=new,
        difference=compared.sign * (new - old),
        low=low,
        high=high,
        outcome=_outcome(low, high, margin),
    )


def _outcome(low: float, high: float, margin: float) -> Outcome:
    return "PASS" if low > -margin else "FAIL" if high < -margin else "INCONCLUSIVE"


def _means(compared: Compared) -> tuple[float, float]:
    if isinstance(compared, UnpairedTask):
        return compared.means
    return float(compared.baseline.mean()), float(compared.candidate.mean())


def _documents(compared: Compared) -> int:
    return min(compared.documents) if isinstance(compared, UnpairedTask) else len(compared.gain)


def _paired_verdict(
    pair: TaskPair,
    outcome: Outcome,
    bounds: Interval,
    needed: int | None,
    also: tuple[Comparison, ...],
    alpha: float,
) -> TaskVerdict:
    documents, wins, losses = _documents(pair), _wins(pair), _losses(pair)
    flips = wilson_interval(wins + losses, documents, alpha)
    recovery, recovery_bounds = _recovery(pair, alpha)
    return TaskVerdict(
        task=pair.task,
        metric=pair.metric,
        filter=pair.filter,
        outcome=outcome,
        documents=documents,
        baseline=_score(pair, pair.baseline, alpha),
        candidate=_score(pair, pair.candidate, alpha),
        difference=float(pair.gain.mean()),
        low=bounds.low,
        high=bounds.high,
        right_to_wrong=losses,
        wrong_to_right=wins,
        changed_wrong=_changed_wrong(pair) if pair.answers_known else None,
        flip_rate=(wins + losses) / documents,
        flip_low=flips.low,
        flip_high=flips.high,
        mcnemar_p=mcnemar_p(wins, losses) if pair.binary else permutation_p(pair.gain),
        recovery=recovery,
        recovery_low=recovery_bounds.low if recovery_bounds else None,
        recovery_high=recovery_bounds.high if recovery_bounds else None,
        documents_needed=needed,
        flips=tuple(islice(_flips(pair), MAX_FLIPS)),
        clusters=None if pair.clusters is None else len(np.unique(pair.clusters)),
        also=also,
    )


def _unpaired_verdict(
    compared: UnpairedTask,
    outcome: Outcome,
    bounds: Interval,
    needed: int | None,
    also: tuple[Comparison, ...],
    alpha: float,
) -> TaskVerdict:
    old, new = compared.means
    has_recovery = old > 0 and compared.sign > 0
    return TaskVerdict(
        task=compared.task,
        metric=compared.metric,
        filter=compared.filter,
        outcome=outcome,
        documents=_documents(compared),
        baseline=_unpaired_score(compared, 0, alpha),
        candidate=_unpaired_score(compared, 1, alpha),
        difference=compared.difference,
        low=bounds.low,
        high=bounds.high,
        right_to_wrong=None,
        wrong_to_right=None,
        changed_wrong=None,
        flip_rate=None,
        flip_low=None,
        flip_high=None,
        mcnemar_p=None,
        recovery=new / old if has_recovery else None,
        recovery_low=1 + bounds.low / old if has_recovery else None,
        recovery_high=1 + bounds.high / old if has_recovery else None,
        documents_needed=needed,
        flips=(),
        also=also,
    )


def _unpaired_score(compared: UnpairedTask, side: int, alpha: float) -> Score:
    value, documents = compared.means[side], compared.documents[side]
    if compared.binary:
        low, high = wilson_interval(min(documents, value * documents), documents, alpha)
    else:
        spread = float(stats.norm.isf(alpha)) * (compared.variances[side] / documents) ** 0.5
        low, high = value - spread, value + spread
    return _made_score(compared, value, documents, Interval(low, high))


def _made_score(compared: Compared, value: float, documents: int, bounds: Interval) -> Score:
    return Score(
        task=compared.task,
        metric=compared.metric,
        filter=compared.filter,
        documents=documents,
        value=value,
        low=bounds.low,
        high=bounds.high,
    )


def _wins(pair: TaskPair) -> int:
    return int((pair.gain > 0).sum())


def _losses(pair: TaskPair) -> int:
    return int((pair.gain < 0).sum())


def _span(pair: TaskPair) -> float:
    """The width of the metric's range: 1, or more where the scores show more."""
    return max(1.0, float(np.ptp(np.concatenate([pair.baseline, pair.candidate]))))


def _score(pair: TaskPair, scores: Scores, alpha: float) -> Score:
    value = float(scores.mean())
    if pair.clusters is not None and not pair.binary:
        low, high = clustered_bootstrap(scores, pair.clusters, alpha, span=_span(pair))
    elif pair.clusters is not None:
        worth = effective(scores, pair.clusters, alpha)
        low, high = wilson_interval(
            float(scores.sum()) / worth.design, len(scores) / worth.design, worth.alpha
        )
    elif pair.binary:
        low, high = wilson_interval(float(scores.sum()), len(scores), alpha)
    else:
        low, high = bootstrap_interval(scores, alpha, span=_span(pair))
    return _made_score(pair, value, len(scores), Interval(low, high))


def _recovery(pair: TaskPair, alpha: float) -> tuple[float | None, Interval | None]:
    """Candidate / baseline with its interval: Bonett and Price for 0/1 metrics, else the difference's bounds
    divided by the baseline's mean. None where that mean is not positive or lower is better.
    """
    baseline, candidate = float(pair.baseline.mean()), float(pair.candidate.mean())
    if baseline <= 0 or pair.sign < 0:
        return None, None
    if pair.binary and pair.clusters is None:
        both = int((pair.baseline * pair.candidate).sum())
        return candidate / baseline, recovery_interval(both, _wins(pair), _losses(pair), alpha)
    low, high = difference_interval(pair, alpha)
    return candidate / baseline, Interval(1 + low / baseline, 1 + high / baseline)


def _needed(compared: Compared, margin: float, alpha: float, fail_alpha: float) -> int | None:
    documents, spread = _documents(compared), 1.0
    if isinstance(compared, UnpairedTask):
        statistic = compared.statistic(-margin)
        return documents_to_settle(documents, statistic, alpha if statistic > 0 else fail_alpha)
    if compared.binary:
        statistic = tango_statistic(_wins(compared), _losses(compared), documents, -margin)
        spread = spread_over_null(_wins(compared), _losses(compared), documents, margin)
    else:
        statistic = mean_statistic(compared.gain, -margin, _span(compared))
    level = alpha if statistic > 0 else fail_alpha
    if compared.clusters is not None:
        worth = effective(compared.gain, compared.clusters, level)
        statistic, level = statistic / worth.design**0.5, worth.alpha
    return documents_to_settle(documents, statistic, level, spread=spread)


def _changed_wrong(pair: TaskPair) -> int:
    """Documents that both models answer wrong, and differently."""
    right = 1.0 if pair.sign > 0 else 0.0
    return sum(
        1
        for gain, score, (old, new) in zip(pair.gain, pair.baseline, pair.documents, strict=True)
        if gain == 0 and score != right and old.compared != new.compared
    )


def _flips(pair: TaskPair) -> Iterator[Flip]:
    """Documents from right to wrong, then those from wrong to right; none if the metric is not 0/1."""
    if not pair.binary:
        return
    for index in np.argsort(pair.gain, kind="stable"):
        gain, (old, new) = pair.gain[index], pair.documents[index]
        if gain:
            yield Flip(
                doc_id=old.doc_id,
                prompt=old.prompt,
                target=old.target,
                baseline=old.answer,
                candidate=new.answer,
                direction="right to wrong" if gain < 0 else "wrong to right",
            )
