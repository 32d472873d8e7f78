"""Compare two models on a task: from scores to a TaskVerdict."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from vexport.judge.corpus import LEAST_DOCUMENTS
from vexport.judge.lost import count_answers, lost_answers_text
from vexport.judge.pairs import TaskPair
from vexport.judge.statistics import (
    Interval,
    bootstrap_interval,
    cluster_correction,
    clustered_tango,
    documents_to_settle,
    mcnemar_p,
    mean_statistic,
    permutation_p,
    recovery_interval,
    seeds_to_settle,
    spread_over_null,
    student_interval,
    tango_statistic,
    wilson_interval,
)
from vexport.judge.worst_candidate import with_worst_candidate
from vexport.records import AnswerCounts, Comparison, Flip, Outcome, Score, TaskVerdict
from vexport.records.margin import Margin, Margins, outcome_of
from vexport.records.values import plural
from vexport.scores.aggregates import Scores
from vexport.scores.endings import Ending

MAX_FLIPS = 50
"""Maximum number of changed documents shown for each task."""


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
    student = student_interval(values, alpha, pair.clusters)
    return Interval(min(bounds.low, student.low), max(bounds.high, student.high))


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
    bounds = difference_interval(pair, alpha)
    low = bounds.low
    high = bounds.high if fail_alpha == alpha else difference_interval(pair, fail_alpha).high
    outcome, baseline = outcome_of(low, high, margin), _score(pair, pair.baseline, alpha)
    levels = Levels(margin=margin, alpha=alpha, fail_alpha=fail_alpha)
    uninformative = _uninformative(pair, baseline, levels, outcome, is_templated)
    outcome = "INCONCLUSIVE" if uninformative else outcome
    counts, words, too_many_lost = _lost_answers(pair, margin, alpha)
    if too_many_lost and outcome != "FAIL":
        outcome = "INCONCLUSIVE"
        uninformative = f"{_scored(pair, baseline)}; {words}" if uninformative else ""
    wins, losses = pair.wins, pair.losses
    flips = wilson_interval(wins + losses, len(pair.gain), alpha)
    recovery, recovery_low, recovery_high = _recovery(pair, bounds, alpha)
    is_open = outcome == "INCONCLUSIVE" and not uninformative and not too_many_lost
    needed, seeds_needed = _needed(pair, levels) if is_open else (None, None)
    return TaskVerdict(
        task=pair.task,
        metric=pair.metric,
        filter=pair.filter,
        outcome=outcome,
        documents=len(pair.gain) // pair.seeds,
        baseline=baseline,
        candidate=_score(pair, pair.candidate, alpha),
        difference=pair.difference,
        low=low,
        high=high,
        right_to_wrong=losses,
        wrong_to_right=wins,
        changed_wrong=_changed_wrong(pair),
        flip_rate=(wins + losses) / len(pair.gain),
        flip_low=flips.low,
        flip_high=flips.high,
        mcnemar_p=mcnemar_p(wins, losses)
        if pair.binary and pair.seeds == 1
        else permutation_p(_means(pair)),
        recovery=recovery,
        recovery_low=recovery_low,
        recovery_high=recovery_high,
        uninformative=uninformative,
        documents_needed=needed,
        seeds=pair.seeds,
        seeds_needed=seeds_needed,
        flips=tuple(islice(_flips(pair), MAX_FLIPS)),
        clusters=None
        if pair.clusters is None or pair.responses_per_cluster > 1
        else len(np.unique(pair.clusters)),
        also=tuple(
            comparison(other, margins.of(pair.task, other.unit), alpha)
            for other in pair.informational
        ),
        unit=pair.unit,
        higher_is_better=pair.sign > 0,
        direction_assumed=pair.direction_assumed,
        baseline_answers=counts[0],
        candidate_answers=counts[1],
        lost_answers=words,
        too_many_lost=too_many_lost,
        documents_available=pair.available,
        settling_margin=_settling_margin(pair, low, needed, margin),
        margin=margin,
        relative_margin=given.value if given.is_relative else None,
    )


def margin_amount(pair: TaskPair, margin: Margin) -> float:
    """Return the margin in the unit of the pair's difference."""
    return margin.amount(pair.unit, pair.baseline_value)


def _scored(pair: TaskPair, baseline: Score) -> str:
    if pair.own_unit is not None:
        return f"the baseline's {pair.metric} is {baseline.value:.4g}"
    return f"the baseline scores {100 * baseline.value:.3g}%"


def _lost_answers(
    pair: TaskPair, margin: float, alpha: float
) -> tuple[tuple[AnswerCounts | None, AnswerCounts | None], str, bool]:
    """Return both models' counts, a text on lost responses, and whether too many are lost.

    A lost response may hide a loss of the metric's whole range. Therefore too many responses are
    lost if their share of all responses, times the range, is above the margin. For a metric of the
    whole corpus, the baseline's value replaces the range.
    """
    scores, sign, cost = (pair.baseline, pair.candidate), pair.sign, pair.range_width
    if pair.scored is not None:
        scores = (pair.scored[0], pair.scored[1])
        sign = 1
    if pair.own_unit is not None:
        cost = abs(pair.baseline_value)
    baseline = _answer_counts([old.ending for old, _ in pair.documents], scores[0], sign, alpha)
    candidate = _answer_counts([new.ending for _, new in pair.documents], scores[1], sign, alpha)
    shares = [side.lost / side.answers for side in (baseline, candidate) if side is not None]
    too_many = bool(shares) and max(shares) * cost > margin
    words = lost_answers_text(baseline, candidate)
    return (baseline, candidate), words, too_many and bool(words)


def _answer_counts(
    endings: Sequence[Ending | None], scores: Scores, sign: int, alpha: float
) -> AnswerCounts | None:
    """Count a model's responses by how they ended. Return None if some are not generated text."""
    known = [ending for ending in endings if ending is not None]
    return (
        count_answers(known, scores, sign=sign, alpha=alpha) if len(known) == len(endings) else None
    )


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


def _uninformative(
    pair: TaskPair, baseline: Score, levels: Levels, outcome: Outcome, is_templated: bool | None
) -> str:
    """Return the reason why the task cannot show a loss, with a remedy, else "".

    This is the case if the same decision is not FAIL for the worst possible candidate. If the
    outcome is INCONCLUSIVE, further documents would help both decisions. The task is then merely
    not settled, unless the baseline is not clearly better than the worst candidate, or not better
    by more than the margin.

    A metric of the whole corpus is also uninformative if there are too few documents.
    """
    if outcome == "FAIL":
        return ""
    documents = len(pair.gain) // pair.seeds
    if pair.own_unit is not None and documents < LEAST_DOCUMENTS:
        return f"it has {plural(documents, 'document')}, and needs at least {LEAST_DOCUMENTS}"
    worst = with_worst_candidate(pair)
    if worst is None:
        return ""
    high = difference_interval(worst, levels.fail_alpha).high
    is_better = worst.difference < -levels.margin and high < 0
    is_open = outcome == "INCONCLUSIVE" and is_better
    if high < -levels.margin or is_open:
        return ""
    chance = pair.chance if pair.own_unit is None else 0.0
    guessing = f", and guessing {100 * chance:.3g}%" if chance else ""
    loss = f"so that even the worst candidate loses only {_amount(pair, -worst.difference)}"
    known = f"{_scored(pair, baseline)}{guessing}, {loss}"
    return "; ".join([known, *_remedies(worst, high, levels, is_templated)])


def _remedies(
    worst: TaskPair, high: float, levels: Levels, is_templated: bool | None
) -> Iterator[str]:
    """Yield the documents or the margin at which a task could show a loss, and a likely cause.

    `high` is the upper bound of the difference with the worst possible candidate.
    """
    ways = []
    is_small = worst.difference >= -levels.margin
    needed, _ = (None, None) if is_small else _needed(worst, levels)
    if needed is not None:
        ways.append(f"about {needed:,} documents")
    if high < 0:
        ways.append(f"a margin below {_margin_amount(worst, -high)}")
    if ways:
        yield f"{' or '.join(ways)} would show a loss"
    if is_small or high >= 0:
        yield f"the likely cause is {_likely_cause(worst, is_small, is_templated)}"


def _likely_cause(worst: TaskPair, is_small: bool, is_templated: bool | None) -> str:
    """Return the likely cause of a task that cannot show a loss.

    A baseline that could lose at least half of the range above guessing does the task well. The
    cause is then the margin, or the number of documents. `is_small` is True if no loss exceeds the
    margin.
    """
    half = (1 - worst.chance) * worst.range_width / 2
    is_done_well = worst.own_unit is None and -worst.difference >= half
    if not is_done_well:
        return _cause_of_low_score(is_templated)
    return "the margin, which no loss exceeds" if is_small else "that there are too few documents"


def _cause_of_low_score(is_templated: bool | None) -> str:
    """Return the likely cause of a baseline that has hardly anything to lose."""
    if is_templated:
        return (
            "that the task is too hard for the model, or does not fit the chat template: choose a "
            "task that the model can do"
        )
    if is_templated is False:
        return (
            "that the task is too hard for the model, or its prompts have an unfamiliar format: "
            "choose a task that the model can do"
        )
    return "the format of the prompts (a chat template?), or a task that is too hard"


def _amount(pair: TaskPair, loss: float) -> str:
    """Return a loss with its unit."""
    if pair.unit == "share":
        points = f"{100 * loss + 0.0:.3g}"
        return f"{points} {'point' if points == '1' else 'points'}"
    return f"{loss + 0.0:.3g} in {pair.metric}"


def _margin_amount(pair: TaskPair, loss: float) -> str:
    """Return a loss as a margin, rounded down: points, or per cent of the baseline's value."""
    if pair.unit == "share":
        return f"{_rounded_down(100 * loss)} points"
    return f"{_rounded_down(100 * loss / abs(pair.baseline_value))}%"


def _rounded_down(value: float) -> str:
    """Return a positive number with two digits that is at most `value`."""
    digits = 1 - math.floor(math.log10(value))
    return f"{math.floor(value * 10.0**digits) / 10.0**digits:.6g}"


def _means(pair: TaskPair) -> Scores:
    """Return the mean change of each document."""
    if pair.clusters is None or pair.responses_per_cluster == 1:
        return pair.changed
    means: Scores = np.bincount(pair.clusters, weights=pair.changed) / pair.seeds
    return means


def _score(pair: TaskPair, scores: Scores, alpha: float) -> Score:
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
    return Score(
        task=pair.task,
        metric=pair.metric,
        filter=pair.filter,
        documents=len(scores) // pair.seeds,
        value=value,
        low=low,
        high=high,
    )


def _recovery(
    pair: TaskPair, difference: Interval, alpha: float
) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return candidate / baseline and its bounds. `difference` has the bounds of the difference.

    For 0/1 metrics without clusters, the bounds are Bonett and Price's. For other metrics, a bound
    is 1 + (bound of the difference) / (baseline's mean). All three are None if the baseline's mean
    is not positive, if lower is better, or if differences are in nats.
    """
    baseline, candidate = float(pair.baseline.mean()), float(pair.candidate.mean())
    if baseline <= 0 or pair.sign < 0 or pair.unit.startswith("nats"):
        return None, None, None
    if pair.binary and pair.clusters is None:
        both = int((pair.baseline * pair.candidate).sum())
        return candidate / baseline, *recovery_interval(both, pair.wins, pair.losses, alpha)
    low, high = difference
    return candidate / baseline, 1 + low / baseline, 1 + high / baseline


def _needed(pair: TaskPair, levels: Levels) -> tuple[int | None, int | None]:
    """Return how many documents would settle the task, and how many seeds would settle it instead.

    With more seeds, each of the present documents gets more responses. The first number is None if
    no number of documents would settle the task. The second number is also None if each document
    has a single response, or if no number of seeds would settle the task.
    """
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
        return None, None
    needed = math.ceil(needed / pair.seeds)
    if pair.responses_per_cluster == 1:
        return needed, None
    return needed, seeds_to_settle(
        documents // pair.responses_per_cluster,
        pair.responses_per_cluster,
        correction.design,
        needed,
    )


def _settling_margin(pair: TaskPair, low: float, needed: int | None, margin: float) -> float | None:
    """Return the smallest margin at which all documents of the task would give PASS.

    The estimate assumes that the difference stays the same. The distance from the difference to the
    bound then shrinks with the square root of the number of documents. The margin is rounded up to
    half a point. Returns None if the task has enough documents for its present margin, or if its
    scores are not shares.
    """
    if needed is None or pair.available is None or needed <= pair.available:
        return None
    if pair.unit != "share":
        return None
    difference = float(pair.gain.mean())
    documents = len(pair.gain) // pair.seeds
    width = (difference - low) * math.sqrt(documents / pair.available)
    settling = math.ceil(200 * max(width - difference, 0.0) + 1e-9) / 200
    return settling if settling > margin else None


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
