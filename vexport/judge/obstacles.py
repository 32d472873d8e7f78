"""Find the reason why a task cannot pass, whatever its interval.

Either the task cannot show a loss, because even the worst possible candidate would not fail, or too
many responses do not count.
"""

import math
from collections.abc import Iterator, Sequence

from vexport.judge.corpus import LEAST_DOCUMENTS
from vexport.judge.intervals import Levels, difference_interval, needed_to_settle
from vexport.judge.lost import count_answers, too_many_lost_text
from vexport.judge.pairs import TaskPair
from vexport.judge.worst_candidate import with_worst_candidate
from vexport.records import AnswerCounts, Answers, Estimate, Outcome, Reason
from vexport.rules import verdict
from vexport.scores.aggregates import Scores
from vexport.scores.endings import Ending


def count_endings(pair: TaskPair, alpha: float) -> Answers | None:
    """Count the responses of both models by how they ended. Return None if nothing is known."""
    scores, sign = (pair.baseline, pair.candidate), pair.sign
    if pair.scored is not None:
        scores, sign = (pair.scored[0], pair.scored[1]), 1
    baseline = _answer_counts([old.ending for old, _ in pair.documents], scores[0], sign, alpha)
    candidate = _answer_counts([new.ending for _, new in pair.documents], scores[1], sign, alpha)
    if baseline is None and candidate is None:
        return None
    return Answers(baseline=baseline, candidate=candidate)


def _answer_counts(
    endings: Sequence[Ending | None], scores: Scores, sign: int, alpha: float
) -> AnswerCounts | None:
    """Count a model's responses by how they ended. Return None if some are not generated text."""
    known = [ending for ending in endings if ending is not None]
    return (
        count_answers(known, scores, sign=sign, alpha=alpha) if len(known) == len(endings) else None
    )


def find_obstacle(
    pair: TaskPair,
    baseline: Estimate,
    answers: Answers | None,
    levels: Levels,
    outcome: Outcome,
    is_templated: bool | None,
) -> Reason | None:
    """Return the reason why the task cannot pass, or None.

    `outcome` is the outcome by the interval. If it is FAIL, only lost responses are a reason.
    `baseline` is the baseline's score. `is_templated` is True if a chat template was applied, or
    None if that is unknown.
    """
    lost = _too_many_lost(pair, answers, levels.margin)
    room = None
    if outcome != "FAIL":
        room = _no_room(pair, baseline, levels, outcome, is_templated)
    if lost and room is not None:
        return Reason.of(verdict.LOST_SCORE, score=_scored(pair, baseline), lost=lost)
    return Reason.of(verdict.LOST_RESPONSES, lost=lost) if lost else room


def _too_many_lost(pair: TaskPair, answers: Answers | None, margin: float) -> str:
    """Describe lost responses if they are too many, else return "".

    A lost response may hide a loss of the metric's whole range. Therefore too many responses are
    lost if their share of all responses, times the range, is above the margin. For a metric of the
    whole corpus, the baseline's value replaces the range.
    """
    if answers is None:
        return ""
    sides = [side for side in (answers.baseline, answers.candidate) if side is not None]
    cost = pair.range_width if pair.own_unit is None else abs(pair.baseline_value)
    is_above = max(side.lost / side.answers for side in sides) * cost > margin
    return too_many_lost_text(answers) if is_above else ""


def _no_room(
    pair: TaskPair, baseline: Estimate, levels: Levels, outcome: Outcome, is_templated: bool | None
) -> Reason | None:
    """Return the reason why the task cannot show a loss, with a remedy, or None.

    This is the case if the same decision is not FAIL for the worst possible candidate. If the
    outcome is INCONCLUSIVE, further documents would help both decisions. The task is then merely
    not settled, unless the baseline is not clearly better than the worst candidate, or not better
    by more than the margin.

    A metric of the whole corpus also cannot show a loss if there are too few documents.
    """
    documents = len(pair.gain) // pair.seeds
    if pair.own_unit is not None and documents < LEAST_DOCUMENTS:
        return Reason.of(verdict.FEW_DOCUMENTS, documents=documents, least=LEAST_DOCUMENTS)
    worst = with_worst_candidate(pair)
    if worst is None:
        return None
    high = difference_interval(worst, levels.fail_alpha).high
    is_better = worst.difference < -levels.margin and high < 0
    is_open = outcome == "INCONCLUSIVE" and is_better
    if high < -levels.margin or is_open:
        return None
    chance = pair.chance if pair.own_unit is None else 0.0
    guessing = f", and guessing {100 * chance:.3g}%" if chance else ""
    ways = _remedies(worst, high, levels, is_templated)
    return Reason.of(
        verdict.NO_ROOM,
        score=f"{_scored(pair, baseline)}{guessing}",
        loss=_amount(pair, -worst.difference),
        ways="".join(f"; {way}" for way in ways),
    )


def _scored(pair: TaskPair, baseline: Estimate) -> str:
    if pair.own_unit is not None:
        return f"the baseline's {pair.metric} is {baseline.value:.4g}"
    return f"the baseline scores {100 * baseline.value:.3g}%"


def _remedies(
    worst: TaskPair, high: float, levels: Levels, is_templated: bool | None
) -> Iterator[str]:
    """Yield the documents or the margin at which a task could show a loss, and a likely cause.

    `high` is the upper bound of the difference with the worst possible candidate.
    """
    ways = []
    is_small = worst.difference >= -levels.margin
    needed = None if is_small else needed_to_settle(worst, levels)
    if needed is not None:
        ways.append(f"about {needed.documents:,} documents")
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
