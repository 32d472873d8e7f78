"""Verdicts on folders made by the real lm-eval."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import pytest

from tests.texts import assert_contains
from vexport.files import from_json, to_json
from vexport.inference.repeated import Repeated, compare_rows, write_repeated
from vexport.judge.accepting import accept_results
from vexport.judge.statistics import tango_interval
from vexport.judge.verdict import decide
from vexport.records import TaskVerdict, Verdict
from vexport.records.values import about
from vexport.scores.readers.accepted import read_accepted
from vexport.scores.readers.lm_eval import read_lm_eval


def compare(runs: Path, name: str, margin: float = 0.02) -> Verdict:
    return decide(runs / "baseline", runs / name, margin=margin, alpha=0.05)


def task_of(verdict: Verdict, name: str) -> TaskVerdict:
    (task,) = [task for task in verdict.tasks if task.task == name]
    return task


def test_copy_passes_without_difference(lm_eval_runs: Path) -> None:
    verdict = compare(lm_eval_runs, "twin")
    assert verdict.outcome == "PASS"
    for task in verdict.tasks:
        changes = task.changes
        changed = (changes.right_to_wrong, changes.wrong_to_right, changes.flips)
        assert (task.difference, *changed) == (
            0,
            0,
            0,
            (),
        )
        assert task.low < 0 < task.high
        assert task.recovery is not None
        assert task.recovery.value == 1


def test_real_loss_shows_flipped_documents(lm_eval_runs: Path, tmp_path: Path) -> None:
    verdict = compare(lm_eval_runs, "worse")
    sums = task_of(verdict, "sums")
    assert verdict.outcome == "FAIL"
    assert (sums.changes.right_to_wrong, sums.changes.wrong_to_right) == (55, 3)
    assert sums.low == pytest.approx(tango_interval(3, 55, 400, 0.05).low)
    first = sums.changes.flips[0]
    assert (first.doc_id, first.prompt, first.target) == (5, "5 + 0 =", "5")
    assert (first.baseline, first.candidate, first.direction) == ("5", "6", "right to wrong")
    chosen = task_of(verdict, "choices").changes.flips[0]
    assert (chosen.target, chosen.baseline, chosen.candidate) == ("5", "5", "none of them")
    assert_contains(
        verdict.reason, "all 3 tasks", "more than 2 points", "choices loses 13.0 points", "9.49"
    )
    assert_contains(verdict.method, "3 tasks", "Holm")
    assert compare(lm_eval_runs, "worse", margin=0.25).outcome == "PASS"
    file = tmp_path / "verdict.json"
    file.write_text(to_json(verdict))
    json.loads(file.read_text(), parse_constant=pytest.fail)
    assert from_json(Verdict, file) == verdict


def test_inconclusive_gives_needed_documents(lm_eval_runs: Path) -> None:
    verdict = compare(lm_eval_runs, "doubtful")
    sums = task_of(verdict, "sums")
    assert verdict.outcome == sums.outcome == "INCONCLUSIVE"
    assert sums.needed is not None
    assert sums.needed.documents > 400
    unsettled = [task.task for task in verdict.tasks if task.outcome == "INCONCLUSIVE"]
    assert len(unsettled) == 2
    assert_contains(verdict.reason, "2 of 3 tasks", *unsettled)


def test_small_task_names_its_documents(copies: Path, lm_eval_runs: Path) -> None:
    """If the task has no more documents, the remedy is a larger task."""
    sums = task_of(compare(lm_eval_runs, "doubtful"), "sums")
    assert sums.needed is not None
    assert sums.needed.available == sums.documents == 400
    assert_contains(sums.needed.remedy, "400 documents", "larger task")
    (file,) = (copies / "baseline").rglob("results_*.json")
    content = json.loads(file.read_text())
    content["n-samples"]["sums"]["original"] = 100_000
    file.write_text(json.dumps(content))
    verdict = decide(copies / "baseline", lm_eval_runs / "doubtful", margin=0.02, alpha=0.05)
    sums = task_of(verdict, "sums")
    assert sums.needed is not None
    assert_contains(sums.needed.remedy, f"{about(sums.needed.documents)} documents")
    assert "larger" not in sums.needed.remedy


def rows_of(scores: Sequence[float], prompt: str = "p") -> list[Mapping[str, object]]:
    """Return samples of lm-eval with the given scores."""
    return [
        {
            "doc_id": number,
            "filter": "none",
            "prompt_hash": f"{prompt}{number}",
            "metrics": ["acc"],
            "acc": acc,
        }
        for number, acc in enumerate(scores)
    ]


def test_changed_answers_are_counted_by_document() -> None:
    first = {"one": rows_of([1, 1, 0, 0]), "two": rows_of([1, 0])}
    again = {"one": rows_of([1, 0, 0, 1]), "two": rows_of([1])}
    assert compare_rows(first, again) == Repeated(documents=5, changed=2)
    assert compare_rows({"one": rows_of([1])}, {"one": rows_of([0], prompt="q")}) == Repeated(
        documents=0, changed=0
    )
    assert compare_rows({"one": rows_of([0.51])}, {"one": rows_of([0.52])}).changed == 0


@pytest.mark.parametrize(
    ("changed", "documents", "sampled"),
    [(3, 200, False), (0, 0, False), (40, 200, True)],
)
def test_method_gives_repeatability(
    copies: Path, changed: int, documents: int, sampled: bool
) -> None:
    """The method contains the number of repeated answers that changed, sampled or not."""
    folder = read_lm_eval(copies / "baseline").file.parent
    write_repeated(folder, Repeated(documents=documents, changed=changed, sampled=sampled))
    verdict = compare(copies, "twin")
    assert_contains(verdict.method, f"{changed} of {documents} responses")


def test_verdict_records_its_circumstances(lm_eval_runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "accepted.json"
    accepted_at = "2020-01-01T00:00:00+00:00"
    accept_results(lm_eval_runs / "baseline", file, {}, accepted_at=accepted_at)
    judged = decide(file, lm_eval_runs / "worse", margin=0.03, alpha=0.05)
    results = read_lm_eval(lm_eval_runs / "worse")
    assert judged.measured == results.measured_at
    assert datetime.fromisoformat(judged.measured).tzinfo is not None
    assert judged.fingerprint == results.fingerprint
    assert judged.baseline_fingerprint == read_accepted(file).fingerprint
    assert judged.accepted is not None
    assert judged.accepted.accepted == accepted_at
