"""Runs that were compared with another model are compared with a given accepted baseline."""

import json
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from tests.command import vexport
from tests.reports import sample
from tests.scores.make import results_file
from vexport.api import history
from vexport.files import to_json
from vexport.inference.fingerprint import write_fingerprint
from vexport.judge.accepted import accept_results, read_accepted
from vexport.judge.verdict import decide
from vexport.records import RowHistory
from vexport.run.stages.concluding import now
from vexport.scores.results import read_results

MARGIN = 0.03
BEFORE = "2020-01-01T00:00:00+00:00"


@pytest.fixture
def run(lm_eval_runs: Path, tmp_path: Path) -> Path:
    """Return a run directory of `worse`, which was compared with a model that is as bad."""
    folder = tmp_path / "run"
    shutil.copytree(lm_eval_runs / "worse", folder / "eval" / "candidate")
    answers = results_file(folder).parent
    write_fingerprint(answers, {"model": "5555", "vllm": "0.32.0"})
    own = decide(lm_eval_runs / "worse", answers, margin=MARGIN, alpha=0.05)
    call = replace(sample.WHOLE.call, created=now())
    report = replace(sample.report(), call=call, verdict=own, reason=own.reason)
    (folder / "report.json").write_text(to_json(report))
    return folder


def accept(lm_eval_runs: Path, path: Path, accepted_at: str) -> Path:
    accept_results(lm_eval_runs / "baseline", path, {}, accepted_at=accepted_at)
    return path


def history_rows(*results: Path) -> list[RowHistory]:
    rows = [row.history for row in history(results).rows]
    return [row for row in rows if row is not None]


def test_given_baseline_replaces_other_model(lm_eval_runs: Path, tmp_path: Path, run: Path) -> None:
    """The numbers equal those of `decide` with the run's margin."""
    file = accept(lm_eval_runs, tmp_path / "accepted.json", BEFORE)
    made = history([run, file])
    expected = decide(file, run / "eval" / "candidate", margin=MARGIN, alpha=0.05)
    assert made.outcome == expected.outcome == "FAIL"
    row = history_rows(run, file)[1]
    assert (row.event, row.judged_against) == ("regressed", str(file))
    for task, judged in zip(row.tasks, expected.tasks, strict=True):
        assert task.verdict is not None
        for name in ("difference", "low", "high", "outcome", "margin"):
            assert getattr(task.verdict, name) == getattr(judged, name), name
    assert any("the run itself: PASS" in note for note in row.notes)
    assert vexport("report", run, file).code == 1
    assert vexport("report", run).code == 0


def test_later_baseline_is_not_used(lm_eval_runs: Path, tmp_path: Path, run: Path) -> None:
    file = accept(lm_eval_runs, tmp_path / "accepted.json", "2999-01-01T00:00:00+00:00")
    rows = history_rows(file, run)
    assert [row.kind for row in rows] == ["run", "accepted baseline"]
    assert (rows[0].judged_against, rows[0].event) == ("", "")


def test_answers_that_do_not_fit_have_a_reason(
    lm_eval_runs: Path, tmp_path: Path, run: Path
) -> None:
    file = accept(lm_eval_runs, tmp_path / "accepted.json", BEFORE)
    content = json.loads(file.read_text())
    content["tasks"] = {"other": content["tasks"]["near"]}
    file.write_text(json.dumps(content))
    row = history_rows(file, run)[1]
    assert row.judged_against == ""
    assert any("no task other" in note for note in row.notes)
    shutil.rmtree(run / "eval")
    row = history_rows(file, run)[1]
    assert any("no responses to tasks" in note for note in row.notes)


def test_verdict_records_its_circumstances(lm_eval_runs: Path, tmp_path: Path) -> None:
    file = accept(lm_eval_runs, tmp_path / "accepted.json", BEFORE)
    judged = decide(file, lm_eval_runs / "worse", margin=MARGIN, alpha=0.05)
    results = read_results(lm_eval_runs / "worse")
    assert judged.measured == results.measured_at
    assert datetime.fromisoformat(judged.measured).tzinfo is not None
    assert judged.fingerprint == results.fingerprint
    assert judged.baseline_fingerprint == read_accepted(file).fingerprint
    assert judged.accepted is not None
    assert judged.accepted.accepted == BEFORE
