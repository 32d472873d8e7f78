"""Verdicts: their words, their numbers, and their rate of errors."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import ArrayLike

from tests.reports import sample
from vexport.evaluation.compare import MAX_FLIPS, compare_task
from vexport.evaluation.pairs import TaskPair
from vexport.evaluation.results import Sample
from vexport.evaluation.verdict import holm_levels, overall_outcome, reason_for
from vexport.evaluation.verdict import judge as judge_tasks
from vexport.files import to_json
from vexport.records import Outcome, TaskVerdict
from vexport.records.values import about

MARGIN, ALPHA, DOCUMENTS = 0.02, 0.05, 400
SAMPLE = Sample(
    doc_id=0,
    filter="none",
    hashes=("",) * 3,
    prompt="1 + 1 =",
    target="2",
    answer="2",
    compared="2",
    scores={},
)


def paired(baseline: ArrayLike, candidate: ArrayLike, *, sign: int = 1) -> TaskPair:
    left, right = np.array(baseline, dtype=np.float64), np.array(candidate, dtype=np.float64)
    return TaskPair(
        task="task",
        metric="acc",
        filter="none",
        sign=sign,
        documents=((SAMPLE, SAMPLE),) * len(left),
        baseline=left,
        candidate=right,
    )


@cache
def from_counts(wins: int, losses: int, documents: int = DOCUMENTS) -> TaskPair:
    rest = documents - wins - losses
    return paired([0] * wins + [1] * (losses + rest), [1] * wins + [0] * losses + [1] * rest)


def judge(pairs: Sequence[TaskPair], margin: float = MARGIN) -> list[TaskVerdict]:
    levels = holm_levels(pairs, margin=margin, alpha=ALPHA)
    return [
        compare_task(pair, margin=margin, alpha=ALPHA, fail_alpha=level)
        for pair, level in zip(pairs, levels, strict=True)
    ]


def rates(loss: float, win: float, tasks: int, draws: int) -> dict[Outcome, float]:
    """How often each outcome comes up for `tasks` tasks with these true shares of changed
    documents.
    """
    rng = np.random.default_rng(7)
    counts: dict[Outcome, int] = {"PASS": 0, "FAIL": 0, "INCONCLUSIVE": 0}
    for drawn in rng.multinomial(DOCUMENTS, [win, loss, 1 - win - loss], (draws, tasks)):
        counts[overall_outcome(judge([from_counts(int(w), int(b)) for w, b, _ in drawn]))] += 1
    return {outcome: count / draws for outcome, count in counts.items()}


@pytest.mark.slow
def test_errors_of_three_tasks_do_not_add_up() -> None:
    """400 draws: 5 %, within 3 standard errors of the simulation (3.3 points)."""
    found = rates(loss=0.045, win=0.025, tasks=3, draws=400)
    assert max(found["PASS"], found["FAIL"]) < ALPHA + 0.033
    assert found["PASS"] + found["FAIL"] > 0.01  # a test that never decides would be no test


def test_outcomes_follow_shown_bounds() -> None:
    assert rates(loss=0.15, win=0.01, tasks=2, draws=50)["FAIL"] == 1
    assert rates(loss=0.005, win=0.005, tasks=2, draws=50)["PASS"] > 0.85
    rng = np.random.default_rng(9)
    for drawn in rng.multinomial(DOCUMENTS, [0.02, 0.06, 0.92], (60, 4)):
        for task in judge([from_counts(int(w), int(b)) for w, b, _ in drawn]):
            expected = (
                "PASS" if task.low > -MARGIN else "FAIL" if task.high < -MARGIN else "INCONCLUSIVE"
            )
            assert task.outcome == expected


def test_holm_steps_from_the_strictest_level() -> None:
    pairs = [from_counts(0, 60), from_counts(2, 18), from_counts(3, 8)]
    assert holm_levels(pairs, margin=MARGIN, alpha=ALPHA) == [ALPHA / 3, ALPHA / 2, ALPHA]
    assert holm_levels(pairs[1:], margin=0.5, alpha=ALPHA) == [ALPHA / 2, ALPHA / 2]


def test_no_change_passes_only_with_enough_documents() -> None:
    (few,), (many,) = judge([from_counts(0, 0, 100)]), judge([from_counts(0, 0, 200)])
    assert (few.outcome, many.outcome) == ("INCONCLUSIVE", "PASS")
    # (1.645 * 0.14 + 0.842 * (1 / 102)^0.5)^2 / 0.02^2: one change in 102, where none was seen in
    # 100
    assert few.documents_needed == 246
    assert (many.difference, many.flip_rate, many.mcnemar_p) == (0, 0, 1)
    (task,) = judge([from_counts(0, 0)], margin=0)
    assert (task.outcome, task.documents_needed) == ("INCONCLUSIVE", None)
    (task,) = judge([from_counts(0, 1, 1)])
    assert task.outcome == "INCONCLUSIVE"


def test_a_baseline_without_a_right_answer_has_no_recovery() -> None:
    (task,) = judge([paired([0.0] * 200, [0.0] * 199 + [1.0])])
    assert (task.recovery, task.recovery_low, task.recovery_high) == (None, None, None)
    assert task.outcome == "INCONCLUSIVE"
    assert "NaN" not in to_json(task)


def test_graded_scores_use_a_bootstrap() -> None:
    rng = np.random.default_rng(5)
    errors = rng.uniform(0.2, 0.4, 300)
    (task,) = judge([paired(errors, errors + rng.uniform(0.05, 0.15, 300), sign=-1)])
    assert (task.outcome, task.recovery) == ("FAIL", None)
    assert task.difference == pytest.approx(-0.1, abs=0.01)
    scores = rng.uniform(0.4, 0.9, 500)
    (same,) = judge([paired(scores, scores + rng.normal(0, 0.05, 500))])
    assert same.outcome == "PASS"
    assert same.low < same.difference < same.high
    assert same.flips == ()


def test_flips_are_limited_and_losses_come_first() -> None:
    (task,) = judge([from_counts(30, 30)])
    directions = [flip.direction for flip in task.flips]
    assert len(directions) == MAX_FLIPS
    assert directions[:30] == ["right to wrong"] * 30


def test_a_task_that_the_baseline_cannot_do_is_named() -> None:
    """The baseline has nothing to lose in this task, so PASS is no evidence."""
    hopeless, fair = (
        paired([1] + [0] * 399, [0] * 400),
        paired([1] * 200 + [0] * 200, [1] * 200 + [0] * 200),
    )
    verdict = judge_tasks([hopeless, fair], margin=MARGIN, alpha=ALPHA)
    assert verdict.outcome == "INCONCLUSIVE"
    assert "shows nothing: the baseline scores 0.25%" in verdict.reason
    assert verdict.tasks[0].documents_needed is None
    assert judge_tasks([fair], margin=MARGIN, alpha=ALPHA).outcome == "PASS"


def task(
    name: str, difference: float, low: float, high: float, *, needed: int | None = None
) -> TaskVerdict:
    """A task of 1,382 documents, judged against a margin of 2 points."""
    outcome: Outcome = "PASS" if low > -0.02 else "FAIL" if high < -0.02 else "INCONCLUSIVE"
    made = sample.verdict().tasks[1]
    candidate = replace(made.candidate, value=made.baseline.value + difference)
    made = replace(made, task=name, outcome=outcome, documents=1382, candidate=candidate)
    return replace(made, difference=difference, low=low, high=high, documents_needed=needed)


def own_units(name: str, difference: float, low: float, high: float) -> TaskVerdict:
    """Return a perplexity of about 27, for which a rise is a loss."""
    made = task(name, difference, low, high)
    return replace(
        made,
        metric="word_perplexity",
        baseline=replace(made.baseline, value=27.31),
        candidate=replace(made.candidate, value=27.31 - difference),
    )


GOOD = task("addition", -0.0043, -0.0084, -0.0007)
SAME = task("facts", 0.0, -0.0042, 0.0078)
BETTER = task("choice", 0.0051, -0.0012, 0.0101)
CLEARLY_BETTER = task("choice", 0.0052, 0.0012, 0.0101)
BAD = task("addition", -0.221, -0.24, -0.203)
WORSE = task("facts", -0.3859, -0.418, -0.349)
OPEN = task("addition", -0.0141, -0.0252, -0.0047, needed=2810)
HOPELESS = task("facts", -0.02, -0.03, -0.01)


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        (
            [GOOD, SAME, BETTER, BETTER],
            "all 4 tasks lose less than 2 points (worst: addition -0.43, at worst -0.84)",
        ),
        ([SAME, BETTER], "both tasks lose less than 2 points (worst: facts 0.00, at worst -0.42)"),
        ([GOOD], "addition loses 0.43 points (at most 0.84), 2 points were accepted"),
        ([SAME], "facts loses nothing (at most 0.42 points), 2 points were accepted"),
        ([BETTER], "choice gains 0.51 points (at worst it loses 0.12), 2 points were accepted"),
        ([CLEARLY_BETTER], "choice gains 0.52 points (at least 0.12), 2 points were accepted"),
        ([BAD], "addition loses 22.1 points (at least 20.3), 2 points were accepted"),
        (
            [BAD, SAME],
            "addition loses 22.1 points (at least 20.3), 2 points were accepted; the other "
            "task passes",
        ),
        (
            [SAME, BAD, GOOD],
            "addition loses 22.1 points (at least 20.3), 2 points were accepted; the other 2 "
            "tasks pass",
        ),
        ([BAD, OPEN], "addition loses 22.1 points (at least 20.3), 2 points were accepted"),
        ([BAD, WORSE], "both tasks lose more than 2 points (worst: facts -38.6, at best -34.9)"),
        (
            [BAD, WORSE, GOOD],
            "2 of 3 tasks lose more than 2 points (worst: facts -38.6, at best -34.9)",
        ),
        (
            [OPEN, SAME],
            "addition is not settled after 1,382 documents: -1.41 points, between -2.52 and -0.47, "
            "2 points were accepted; about 2,900 would settle it; the other task passes",
        ),
        (
            [HOPELESS],
            "facts is not settled after 1,382 documents: -2.00 points, between -3.00 and -1.00, "
            "2 points were accepted; at this difference no number of documents would settle it",
        ),
        (
            [OPEN, HOPELESS],
            "2 of 2 tasks are not settled: addition (read 1,382 documents, about 2,900 needed), "
            "facts (read 1,382 documents, no number would settle it)",
        ),
        (
            [OPEN] * 5,
            "5 of 5 tasks are not settled: "
            + ", ".join(["addition (read 1,382 documents, about 2,900 needed)"] * 3)
            + " and 2 more",
        ),
        (
            [own_units("wikitext", -0.31, -0.4, -0.2)],
            "wikitext loses 0.31 in word_perplexity (at least 0.20), 0.02 in word_perplexity "
            "was accepted",
        ),
        (
            [GOOD, own_units("wikitext", 0.31, 0.2, 0.4)],
            "both tasks lose less than 2 points or 0.02 in word_perplexity "
            "(worst: addition -0.43, at worst -0.84)",
        ),
    ],
)
def test_every_outcome_has_one_sentence(tasks: Sequence[TaskVerdict], sentence: str) -> None:
    found = reason_for(overall_outcome(tasks), tasks, margin=0.02)
    assert found == sentence
    assert "%" not in found
    assert len(found) < 200


@pytest.mark.parametrize(
    ("margin", "tasks", "words"),
    [
        (0.01, [GOOD], "1 point was accepted"),
        (0.005, [task("addition", -0.001, -0.002, 0.0)], "0.5 points were accepted"),
        (0.0, [task("addition", -0.03, -0.04, -0.021)], "no loss was accepted"),
        (0.0, [CLEARLY_BETTER, CLEARLY_BETTER], "both tasks lose nothing"),
    ],
)
def test_what_was_accepted_reads_as_english(
    margin: float, tasks: Sequence[TaskVerdict], words: str
) -> None:
    assert words in reason_for(overall_outcome(tasks), tasks, margin=margin)


def test_a_bound_next_to_the_margin_does_not_read_like_it() -> None:
    """Less than 2 points, at worst -2.00, would contradict itself."""
    close = task("addition", -0.0101, -0.019996, 0.0)
    assert "at worst -1.9996)" in reason_for("PASS", [close, SAME], margin=0.02)


@pytest.mark.parametrize(
    ("documents", "words"),
    [(7, "about 7"), (303, "about 310"), (2810, "about 2,900"), (70941, "about 71,000")],
)
def test_an_estimate_has_two_digits_and_is_enough(documents: int, words: str) -> None:
    assert about(documents) == words
