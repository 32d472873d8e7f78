"""The verdict: its words, its numbers, and how often it is wrong."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from numpy.typing import ArrayLike

from vexport.evaluation.compare import MAX_FLIPS, compare_task
from vexport.evaluation.pairs import GatedTask, TaskPair
from vexport.evaluation.samples import Sample
from vexport.evaluation.verdict import holm_levels, overall_outcome
from vexport.evaluation.verdict import judge as judge_tasks
from vexport.files import to_json
from vexport.records import Outcome, TaskVerdict

MARGIN, ALPHA, DOCUMENTS = 0.02, 0.05, 400
SAMPLE = Sample(
    doc_id=0,
    filter="none",
    hashes=("", "", ""),
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
    """How often each outcome comes up for `tasks` tasks with these true shares of changed documents."""
    rng = np.random.default_rng(7)
    counts: dict[Outcome, int] = {"PASS": 0, "FAIL": 0, "INCONCLUSIVE": 0}
    for drawn in rng.multinomial(DOCUMENTS, [win, loss, 1 - win - loss], (draws, tasks)):
        counts[overall_outcome(judge([from_counts(int(w), int(b)) for w, b, _ in drawn]))] += 1
    return {outcome: count / draws for outcome, count in counts.items()}


@pytest.mark.slow
def test_a_loss_on_the_margin_passes_and_fails_at_alpha() -> None:
    """800 draws: 5 %, within 3 standard errors of the simulation (2.3 points)."""
    found = rates(loss=0.045, win=0.025, tasks=1, draws=800)
    assert found["PASS"] < ALPHA + 0.023
    assert found["FAIL"] < ALPHA + 0.023
    assert found["PASS"] + found["FAIL"] > 0.05  # a test that never decides would be no test


@pytest.mark.slow
def test_over_three_tasks_on_the_margin_the_errors_do_not_add_up() -> None:
    found = rates(loss=0.045, win=0.025, tasks=3, draws=400)
    assert found["PASS"] < ALPHA + 0.03
    assert found["FAIL"] < ALPHA + 0.03


def test_a_broken_model_fails_and_a_good_one_passes() -> None:
    assert rates(loss=0.15, win=0.01, tasks=2, draws=50)["FAIL"] == 1
    assert rates(loss=0.005, win=0.005, tasks=2, draws=50)["PASS"] > 0.85


def test_the_bounds_shown_are_those_that_decide() -> None:
    rng = np.random.default_rng(9)
    for drawn in rng.multinomial(DOCUMENTS, [0.02, 0.06, 0.92], (60, 4)):
        for task in judge([from_counts(int(w), int(b)) for w, b, _ in drawn]):
            expected = "PASS" if task.low > -MARGIN else "FAIL" if task.high < -MARGIN else "INCONCLUSIVE"
            assert task.outcome == expected


def test_holm_steps_from_the_strictest_level() -> None:
    pairs = [from_counts(0, 60), from_counts(2, 18), from_counts(3, 8)]
    assert holm_levels(pairs, margin=MARGIN, alpha=ALPHA) == [ALPHA / 3, ALPHA / 2, ALPHA]
    assert holm_levels(pairs[1:], margin=0.5, alpha=ALPHA) == [ALPHA / 2, ALPHA / 2]


def test_no_change_passes_only_with_enough_documents() -> None:
    (few,), (many,) = judge([from_counts(0, 0, 100)]), judge([from_counts(0, 0, 200)])
    assert (few.outcome, many.outcome) == ("INCONCLUSIVE", "PASS")
    # (1.645 * 0.14 + 0.842 * (1 / 102)^0.5)^2 / 0.02^2: one change in 102, where none was seen in 100
    assert few.documents_needed == 246
    assert (many.difference, many.flip_rate, many.mcnemar_p) == (0, 0, 1)


def test_a_margin_of_zero_without_change_cannot_be_settled() -> None:
    (task,) = judge([from_counts(0, 0)], margin=0)
    assert (task.outcome, task.documents_needed) == ("INCONCLUSIVE", None)


def test_a_baseline_without_a_right_answer_has_no_recovery() -> None:
    (task,) = judge([paired([0.0] * 200, [0.0] * 199 + [1.0])])
    assert (task.recovery, task.recovery_low, task.recovery_high) == (None, None, None)
    assert task.outcome == "INCONCLUSIVE"
    assert "NaN" not in to_json(task)


def test_one_document_settles_nothing() -> None:
    (task,) = judge([from_counts(0, 1, 1)])
    assert task.outcome == "INCONCLUSIVE"


def test_where_lower_is_better_a_rise_is_a_loss() -> None:
    rng = np.random.default_rng(5)
    errors = rng.uniform(0.2, 0.4, 300)
    (task,) = judge([paired(errors, errors + rng.uniform(0.05, 0.15, 300), sign=-1)])
    assert (task.outcome, task.recovery) == ("FAIL", None)
    assert task.difference == pytest.approx(-0.1, abs=0.01)


def test_graded_scores_use_a_bootstrap() -> None:
    rng = np.random.default_rng(6)
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
    """It has nothing to lose: PASS says nothing there."""
    hopeless, fair = paired([1] + [0] * 399, [0] * 400), paired([1] * 200 + [0] * 200, [1] * 200 + [0] * 200)
    verdict = judge_tasks(
        [GatedTask(gate=hopeless, also=()), GatedTask(gate=fair, also=())], margin=MARGIN, alpha=ALPHA
    )
    assert verdict.outcome == "INCONCLUSIVE"
    assert "shows nothing: the baseline scores 0.25%" in verdict.reason
    assert verdict.tasks[0].documents_needed is None
    assert judge_tasks([GatedTask(gate=fair, also=())], margin=MARGIN, alpha=ALPHA).outcome == "PASS"
