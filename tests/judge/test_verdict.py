"""Verdicts: reasons, numbers, and error rates."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import ArrayLike

from tests.reports import sample
from tests.texts import assert_contains
from vexport.files import to_json
from vexport.judge.intervals import difference_interval
from vexport.judge.pairs import TaskPair
from vexport.judge.reasons import reason_for
from vexport.judge.task_verdict import MAX_FLIPS, compare_task
from vexport.judge.verdict import holm_levels, overall_outcome
from vexport.judge.verdict import judge as judge_tasks
from vexport.records import Needed, Outcome, TaskVerdict
from vexport.records.margin import Margins
from vexport.records.values import about
from vexport.reports import render_verdicts
from vexport.scores.table import Row

MARGIN, ALPHA, DOCUMENTS = 0.02, 0.05, 400
MARGINS = Margins.read(MARGIN)
SAMPLE = Row(
    doc_id=0,
    filter="none",
    hashes=("",) * 3,
    prompt="1 + 1 =",
    target="2",
    shown_text="2",
    compared_text="2",
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
    margins = Margins.read(margin)
    levels = holm_levels(pairs, margins=margins, alpha=ALPHA)
    return [
        compare_task(pair, margins=margins, alpha=ALPHA, fail_alpha=level)
        for pair, level in zip(pairs, levels, strict=True)
    ]


def rates(loss: float, win: float, tasks: int, draws: int) -> dict[Outcome, float]:
    """Simulate how often each outcome occurs for tasks with these true shares of changes."""
    rng = np.random.default_rng(7)
    counts: dict[Outcome, int] = {"PASS": 0, "FAIL": 0, "INCONCLUSIVE": 0}
    for drawn in rng.multinomial(DOCUMENTS, [win, loss, 1 - win - loss], (draws, tasks)):
        counts[overall_outcome(judge([from_counts(int(w), int(b)) for w, b, _ in drawn]))] += 1
    return {outcome: count / draws for outcome, count in counts.items()}


@pytest.mark.slow
def test_error_rate_of_three_tasks() -> None:
    """Simulate 400 draws: wrong outcomes are at most 5 %, plus 3 standard errors (3.3 points)."""
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


def test_holm_levels() -> None:
    pairs = [from_counts(0, 60), from_counts(2, 18), from_counts(3, 8)]
    assert holm_levels(pairs, margins=MARGINS, alpha=ALPHA) == [ALPHA / 3, ALPHA / 2, ALPHA]
    assert holm_levels(pairs[1:], margins=Margins.read(0.5), alpha=ALPHA) == [ALPHA / 2, ALPHA / 2]


def test_pass_needs_enough_documents() -> None:
    (few,), (many,) = judge([from_counts(0, 0, 100)]), judge([from_counts(0, 0, 200)])
    assert (few.outcome, many.outcome) == ("INCONCLUSIVE", "PASS")
    # (1.645 * 0.14 + 0.842 * (1 / 102)^0.5)^2 / 0.02^2. No change in 100 documents counts as 1
    # change in 102.
    assert few.needed == Needed(documents=246)
    assert (many.difference, many.changes.flip_rate.value) == (0, 0)
    (task,) = judge([from_counts(0, 0)], margin=0)
    assert (task.outcome, task.needed) == ("INCONCLUSIVE", None)
    (task,) = judge([from_counts(0, 1, 1)])
    assert task.outcome == "INCONCLUSIVE"


def test_no_recovery_of_zero_baseline() -> None:
    (task,) = judge([paired([0.0] * 200, [0.0] * 199 + [1.0])])
    assert task.recovery is None
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
    assert same.changes.flips == ()


def test_losses_are_first_of_limited_flips() -> None:
    (task,) = judge([from_counts(30, 30)])
    directions = [flip.direction for flip in task.changes.flips]
    assert len(directions) == MAX_FLIPS
    assert directions[:30] == ["right to wrong"] * 30


def test_task_beyond_the_baseline_is_inconclusive() -> None:
    """The baseline scores 0.25 % and has nothing to lose, so that PASS would be no evidence."""
    hopeless, fair = (
        paired([1] + [0] * 399, [0] * 400),
        paired([1] * 200 + [0] * 200, [1] * 200 + [0] * 200),
    )
    verdict = judge_tasks([hopeless, fair], margins=MARGINS, alpha=ALPHA)
    assert verdict.outcome == "INCONCLUSIVE"
    assert_contains(verdict.reason, "baseline", "0.25%")
    assert verdict.tasks[0].needed is None
    assert judge_tasks([fair], margins=MARGINS, alpha=ALPHA).outcome == "PASS"


def task_with(
    name: str, difference: float, low: float, high: float, *, needed: Needed | None = None
) -> TaskVerdict:
    """Return a task of 1,382 documents, judged with a margin of 2 points."""
    outcome: Outcome = "PASS" if low > -0.02 else "FAIL" if high < -0.02 else "INCONCLUSIVE"
    made = sample.verdict().tasks[1]
    candidate = replace(made.candidate, value=made.baseline.value + difference)
    made = replace(made, task=name, outcome=outcome, documents=1382, candidate=candidate)
    return replace(made, difference=difference, low=low, high=high, needed=needed)


def perplexity_with(name: str, difference: float, low: float, high: float) -> TaskVerdict:
    """Return a perplexity of about 27, whose rise is a loss."""
    made = task_with(name, difference, low, high)
    return replace(
        made,
        metric="word_perplexity",
        unit="metric",
        relative_margin=0.001,
        baseline=replace(made.baseline, value=27.31),
        candidate=replace(made.candidate, value=27.31 - difference),
    )


SMALL_LOSS = task_with("addition", -0.0043, -0.0084, -0.0007)
NO_LOSS = task_with("facts", 0.0, -0.0042, 0.0078)
GAIN = task_with("choice", 0.0051, -0.0012, 0.0101)
CLEAR_GAIN = task_with("choice", 0.0052, 0.0012, 0.0101)
LARGE_LOSS = task_with("addition", -0.221, -0.24, -0.203)
LARGER_LOSS = task_with("facts", -0.3859, -0.418, -0.349)
UNSETTLED = task_with("addition", -0.0141, -0.0252, -0.0047, needed=Needed(documents=2810))
NEVER_SETTLED = task_with("facts", -0.02, -0.03, -0.01)


REASONS: list[tuple[list[TaskVerdict], list[str]]] = [
    (
        [SMALL_LOSS, NO_LOSS, GAIN, GAIN],
        ["all 4 tasks", "less than 2 points", "addition loses 0.43 points", "at most 0.84"],
    ),
    (
        [NO_LOSS, GAIN],
        ["both tasks", "less than 2 points", "facts loses nothing", "at most 0.42 points"],
    ),
    ([SMALL_LOSS], ["addition loses 0.43 points", "at most 0.84", "2 points"]),
    ([NO_LOSS], ["facts loses nothing", "at most 0.42 points", "2 points"]),
    ([GAIN], ["choice gains 0.51 points", "loses 0.12", "2 points"]),
    ([CLEAR_GAIN], ["choice gains 0.52 points", "at least 0.12", "2 points"]),
    ([LARGE_LOSS], ["addition loses 22.1 points", "at least 20.3", "2 points"]),
    (
        [LARGE_LOSS, NO_LOSS],
        ["addition loses 22.1 points", "at least 20.3", "2 points", "other task passes"],
    ),
    (
        [NO_LOSS, LARGE_LOSS, SMALL_LOSS],
        ["addition loses 22.1 points", "at least 20.3", "2 points", "other 2 tasks pass"],
    ),
    ([LARGE_LOSS, UNSETTLED], ["addition loses 22.1 points", "at least 20.3", "2 points"]),
    (
        [LARGE_LOSS, LARGER_LOSS],
        ["both tasks", "more than 2 points", "facts loses 38.6 points", "at least 34.9"],
    ),
    (
        [LARGE_LOSS, LARGER_LOSS, SMALL_LOSS],
        ["2 of 3 tasks", "more than 2 points", "facts loses 38.6 points", "at least 34.9"],
    ),
    (
        [UNSETTLED, NO_LOSS],
        [
            "addition is not settled",
            "1,382 documents",
            "-1.41 points",
            "-2.52 and -0.47",
            "2 points",
            "about 2,900",
            "other task passes",
        ],
    ),
    (
        [NEVER_SETTLED],
        [
            "facts is not settled",
            "1,382 documents",
            "-2.00 points",
            "-3.00 and -1.00",
            "2 points",
            "no number of documents",
        ],
    ),
    (
        [perplexity_with("wikitext", -0.31, -0.4, -0.2)],
        [
            "wikitext loses 0.310 in word_perplexity",
            "at least 0.200",
            "0.02 (0.1%) in word_perplexity",
        ],
    ),
    (
        [SMALL_LOSS, perplexity_with("wikitext", 0.31, 0.2, 0.4)],
        [
            "both tasks",
            "2 points or 0.1%",
            "addition loses 0.43 points",
            "at most 0.84",
        ],
    ),
]


@pytest.mark.parametrize(("tasks", "parts"), REASONS)
def test_reason_gives_task_loss_and_bound(tasks: list[TaskVerdict], parts: list[str]) -> None:
    reason = reason_for(overall_outcome(tasks), tasks).text
    assert_contains(reason, *parts)
    assert len(reason) < 200


def test_reason_lists_unsettled_tasks() -> None:
    tasks = [UNSETTLED, NEVER_SETTLED]
    reason = reason_for("INCONCLUSIVE", tasks).text
    assert_contains(reason, "2 of 2 tasks")
    assert re.search(r"addition \([^)]*1,382 [^)]* 2,900 ", reason)
    assert re.search(r"facts \([^)]*1,382 [^)]* no number ", reason)
    reason = reason_for("INCONCLUSIVE", [UNSETTLED] * 5).text
    assert_contains(reason, "5 of 5 tasks", "2 more")
    assert reason.count("2,900") == 3
    assert len(reason) < 200


@pytest.mark.parametrize(
    ("margin", "tasks", "words"),
    [
        (0.01, [SMALL_LOSS], "margin 1 point"),
        (0.005, [task_with("addition", -0.001, -0.002, 0.0)], "margin 0.5 points"),
        (0.0, [task_with("addition", -0.03, -0.04, -0.021)], "margin 0 points"),
        (0.0, [CLEAR_GAIN, CLEAR_GAIN], "both tasks lose nothing"),
    ],
)
def test_margin_in_words(margin: float, tasks: Sequence[TaskVerdict], words: str) -> None:
    tasks = [replace(task, margin=margin) for task in tasks]
    assert words in reason_for(overall_outcome(tasks), tasks).text


def test_bound_near_margin_has_more_digits() -> None:
    """ "Less than 2 points, at most 2.00" would contradict itself."""
    close = task_with("addition", -0.0101, -0.019996, 0.0)
    assert "at most 1.9996)" in reason_for("PASS", [close, NO_LOSS]).text


@pytest.mark.parametrize(
    ("documents", "words"),
    [(7, "about 7"), (303, "about 310"), (2810, "about 2,900"), (70941, "about 71,000")],
)
def test_estimates_are_rounded_up(documents: int, words: str) -> None:
    assert about(documents) == words


def levels_step_by_step(pairs: Sequence[TaskPair]) -> list[float]:
    """Return the levels of Holm's procedure, testing all remaining tasks in each step."""
    levels = [ALPHA] * len(pairs)
    remaining = [*range(len(pairs))]
    while remaining:
        level = ALPHA / len(remaining)
        for index in remaining:
            levels[index] = level
        failed = [i for i in remaining if difference_interval(pairs[i], level).high < -MARGIN]
        if not failed:
            break
        remaining = [index for index in remaining if index not in failed]
    return levels


@pytest.mark.parametrize("seed", range(8))
def test_holm_levels_equal_the_steps(seed: int) -> None:
    losses = np.random.default_rng(seed).integers(10, 34, 12).tolist()
    pairs = [from_counts(3, loss) for loss in losses]
    expected = levels_step_by_step(pairs)
    assert len(set(expected)) > 1
    assert holm_levels(pairs, margins=MARGINS, alpha=ALPHA) == expected


def test_texts_show_the_worst_of_many_tasks() -> None:
    pairs = [replace(from_counts(9, 9), task=f"task{number}") for number in range(300)]
    pairs[217] = replace(from_counts(0, 90), task="broken")
    verdict = judge_tasks(pairs, margins=MARGINS, alpha=ALPHA)
    text = render_verdicts([verdict], "text")
    assert_contains(text, "broken (acc)", "the worst 100 of 300 tasks; --format json has all")
    # The gates and the table show 100 tasks each, and a row compares all tasks together.
    assert text.count("(acc)") == 2 * 100 + 1
    assert "task250 (acc)" not in text
    assert len(json.loads(render_verdicts([verdict], "json"))["tasks"]) == 300
    assert render_verdicts([verdict], "junit").count("<testcase") == 301
