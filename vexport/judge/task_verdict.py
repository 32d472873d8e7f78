"""Compare two models on a task: from scores to a TaskVerdict."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np

from vexport.inference.shipped import shipped_task
from vexport.inference.shipped.base import Obstacle
from vexport.judge.intervals import (
    Levels,
    difference_interval,
    needed_to_settle,
    recovery_of,
    score_of,
)
from vexport.judge.obstacles import count_endings, find_obstacle
from vexport.judge.pairs import TaskPair
from vexport.judge.statistics import wilson_interval
from vexport.records import Changes, Comparison, Estimate, Flip, TaskVerdict
from vexport.records.margin import Margin, Margins, outcome_of

MAX_FLIPS = 50
"""Maximum number of changed documents shown for each task."""


def compare_task(
    pair: TaskPair,
    *,
    margins: Margins,
    alpha: float,
    fail_alpha: float,
    is_templated: bool | None = None,
) -> TaskVerdict:
    """Judge a task.

    The outcome is PASS if the lower bound at `alpha` is above -margin. The outcome is FAIL if the
    upper bound at `fail_alpha` is below -margin. Otherwise the outcome is INCONCLUSIVE.
    `fail_alpha` is at most `alpha`.

    PASS becomes INCONCLUSIVE if the worst possible candidate would not fail, or if a model's share
    of lost responses is above the margin. `is_templated` is True if a chat template was applied, or
    None if that is unknown.
    """
    given = margins.of(pair.task, pair.unit)
    margin = margin_amount(pair, given)
    levels = Levels(margin=margin, alpha=alpha, fail_alpha=fail_alpha)
    bounds = difference_interval(pair, alpha)
    low = bounds.low
    high = bounds.high if fail_alpha == alpha else difference_interval(pair, fail_alpha).high
    outcome, baseline = outcome_of(low, high, margin), score_of(pair, pair.baseline, alpha)
    answers = count_endings(pair, alpha)
    obstacle = find_obstacle(pair, baseline, answers, levels, outcome, is_templated)
    if obstacle is not None and outcome != "FAIL":
        outcome = "INCONCLUSIVE"
    found = _found_obstacle(pair, alpha)
    if found is not None and outcome != "FAIL":
        outcome, obstacle = found
    elif found is not None and found.outcome == "FAIL":
        obstacle = found.reason
    is_open = outcome == "INCONCLUSIVE" and obstacle is None
    return TaskVerdict(
        task=pair.task,
        metric=pair.metric,
        filter=pair.filter,
        documents=len(pair.gain) // pair.seeds,
        unit=pair.unit,
        higher_is_better=pair.sign > 0,
        direction_assumed=pair.direction_assumed,
        difference=pair.difference,
        low=low,
        high=high,
        margin=margin,
        relative_margin=given.value if given.is_relative else None,
        outcome=outcome,
        baseline=baseline,
        candidate=score_of(pair, pair.candidate, alpha),
        recovery=recovery_of(pair, bounds, alpha),
        changes=_changes(pair, alpha),
        seeds=pair.seeds,
        clusters=_task_clusters(pair),
        answers=answers,
        needed=needed_to_settle(pair, levels) if is_open else None,
        obstacle=obstacle,
        also=tuple(
            comparison(other, margins.of(pair.task, other.unit), alpha)
            for other in pair.informational
        ),
        faults=_faults(pair),
    )


def _found_obstacle(pair: TaskPair, alpha: float) -> Obstacle | None:
    """Return the obstacle that a shipped task finds in the scores of both models."""
    task = shipped_task(pair.task)
    if task is None:
        return None
    baseline = [old.scores for old, _ in pair.documents]
    candidate = [new.scores for _, new in pair.documents]
    return task.obstacle(baseline, candidate, alpha)


def _faults(pair: TaskPair) -> dict[str, int]:
    """Count the responses to a shipped task that only the baseline got right, by their faults."""
    task = shipped_task(pair.task)
    if task is None:
        return {}
    worse = (
        new.scores for gain, (_, new) in zip(pair.gain, pair.documents, strict=True) if gain < 0
    )
    return dict(Counter(map(task.fault, worse)))


def margin_amount(pair: TaskPair, margin: Margin) -> float:
    """Return the margin in the unit of the pair's difference."""
    return margin.amount(pair.unit, pair.baseline_value)


def comparison(pair: TaskPair, given: Margin, alpha: float) -> Comparison:
    """Return a difference with its bounds, for information."""
    margin = margin_amount(pair, given)
    low, high = difference_interval(pair, alpha)
    return Comparison(
        task=pair.task,
        metric=pair.metric,
        filter=pair.filter,
        documents=len(pair.gain) // pair.seeds,
        baseline=pair.baseline_value,
        candidate=pair.candidate_value,
        difference=pair.difference,
        low=low,
        high=high,
        outcome="INCONCLUSIVE" if pair.undecided else outcome_of(low, high, margin),
        unit=pair.unit,
        higher_is_better=pair.sign > 0,
        direction_assumed=pair.direction_assumed,
        margin=margin,
        relative_margin=given.value if given.is_relative else None,
    )


def _task_clusters(pair: TaskPair) -> int | None:
    if pair.clusters is None or pair.responses_per_cluster > 1:
        return None
    return len(np.unique(pair.clusters))


def _changes(pair: TaskPair, alpha: float) -> Changes:
    wins, losses, total = pair.wins, pair.losses, len(pair.gain)
    low, high = wilson_interval(wins + losses, total, alpha)
    return Changes(
        right_to_wrong=losses,
        wrong_to_right=wins,
        changed_wrong=_changed_wrong(pair),
        flip_rate=Estimate(value=(wins + losses) / total, low=low, high=high),
        flips=tuple(islice(_flips(pair), MAX_FLIPS)),
    )


def _changed_wrong(pair: TaskPair) -> int | None:
    """Count the documents with two different wrong responses.

    Return None if responses were not stored, or if the metric does not score responses as correct
    or wrong.
    """
    if pair.own_unit is not None or any(old.compared_text is None for old, _ in pair.documents):
        return None
    right = 1.0 if pair.sign > 0 else 0.0
    wrong = (pair.gain == 0) & (pair.baseline != right)
    both_wrong = (pair.documents[index] for index in np.flatnonzero(wrong))
    return sum(1 for old, new in both_wrong if old.compared_text != new.compared_text)


def _flips(pair: TaskPair) -> Iterator[Flip]:
    """Yield documents from right to wrong, then documents from wrong to right.

    Yield nothing if the metric is not 0/1.
    """
    if not pair.binary:
        return
    for index in np.argsort(pair.gain, kind="stable"):
        gain, (old, new) = pair.gain[index], pair.documents[index]
        if gain:
            yield Flip(
                doc_id=old.doc_id,
                prompt=old.prompt,
                target=old.target,
                baseline=old.shown_text,
                candidate=new.shown_text,
                direction="right to wrong" if gain < 0 else "wrong to right",
            )
