"""Output folders of `vexport eval`: their reports, and a second call."""

import json
from pathlib import Path

import jsonschema
import pytest

from tests.command import ROOT, Ran, vexport
from tests.texts import assert_contains
from vexport.errors import InputError
from vexport.run.directory import KIND, RunDirectory

SCHEMA = json.loads((ROOT / "vexport" / "reports" / "report.schema.json").read_text())
pytestmark = pytest.mark.vllm


def evaluate(runs: Path, folder: Path, *options: object, names: tuple[str, ...]) -> Ran:
    """Compare given results of lm-eval with the baseline's results. No model runs."""
    tasks = [runs / "tasks" / f"{name}.yaml" for name in ("sums", "choices", "near")]
    task_options = [word for task in tasks for word in ("--task", task)]
    given = [runs / name for name in names]
    call = ("eval", *given, "--baseline", runs / "baseline", "--trust-remote-code", *task_options)
    return vexport(*call, "--output-dir", folder, *options)


def test_reports_of_given_checkpoint(lm_eval_runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    ran = evaluate(lm_eval_runs, folder, names=("worse",))
    assert ran.code == 1
    assert ran.stdout.startswith("FAIL")
    assert ran.stdout.endswith(f"report: {folder}/report.html\n")
    files = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
    assert files == {"report.html", "report.json", "report.md", "junit.xml", "vexport.log"}
    KIND.require_replaceable(folder, overwrite=True)  # the list of files is complete
    report = json.loads((folder / "report.json").read_text())
    jsonschema.validate(report, SCHEMA)
    assert (report["outcome"], report["name"]) == ("FAIL", "worse")
    assert (report["made"], report["load"]) == (None, None)
    assert report["given"]["name"] == str(lm_eval_runs / "worse")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Flipped between" in page
    assert f"worse against {lm_eval_runs}" in page
    assert "<failure" in (folder / "junit.xml").read_text()
    assert vexport("report", folder).code == 1
    card = vexport("report", folder, "--format", "card")
    assert card.code == 2
    assert_contains(card.errors[0], "got a report", "given", "--format", "vexport run")


def test_second_call_in_other_formats(lm_eval_runs: Path, tmp_path: Path) -> None:
    first = evaluate(lm_eval_runs, tmp_path, "--format", "json", names=("twin",))
    again = evaluate(lm_eval_runs, tmp_path, "--format", "json", names=("twin",))
    assert (first.code, first.stdout) == (again.code, again.stdout)
    assert json.loads(first.stdout)["outcome"] == "PASS"
    html = evaluate(lm_eval_runs, tmp_path, "--format", "html", names=("twin",)).stdout
    assert html.startswith("<!DOCTYPE html>")
    assert "Flipped between" in html
    assert evaluate(lm_eval_runs, tmp_path, "--format", "markdown", names=("twin",)).code == 0
    other = evaluate(lm_eval_runs, tmp_path, "--margin", "0", "--quiet", names=("twin",))
    assert other.code == 3, "the margin changes the outcome without new responses"


def test_reports_of_several_checkpoints(lm_eval_runs: Path, tmp_path: Path) -> None:
    ran = evaluate(lm_eval_runs, tmp_path, names=("worse", "twin"))
    assert ran.code == 1
    parts = [tmp_path / "candidate" / name for name in ("1-worse", "2-twin")]
    outcomes = [json.loads((part / "report.json").read_text())["outcome"] for part in parts]
    assert outcomes == ["FAIL", "PASS"]
    KIND.require_replaceable(tmp_path, overwrite=True)
    missing = vexport("report", tmp_path)
    assert missing.code == 2
    assert f"vexport report {tmp_path}/candidate/*" in missing.errors[0]
    table = vexport("report", *parts).stdout
    assert f"{parts[1]} *" in table
    page = evaluate(lm_eval_runs, tmp_path, "--format", "html", names=("worse", "twin")).stdout
    assert f"{lm_eval_runs}/twin *" in page


@pytest.mark.parametrize(
    ("stage", "same", "other"),
    [("serve candidate", 1, 2), ("serve candidate (1-a)", 2, 1)],
)
def test_folder_keeps_number_of_checkpoints(
    stage: str, same: int, other: int, tmp_path: Path
) -> None:
    """One candidate has the folder `candidate`, and several have folders in it.

    A call with another number of checkpoints would delete the earlier results.
    """
    directory = RunDirectory(tmp_path / "out", "--output-dir")
    directory.begin(overwrite=False)
    directory.finish(stage, {}, {}, 0.0)
    directory.require_same_number(same)
    with pytest.raises(InputError, match="choose another --output-dir"):
        directory.require_same_number(other)
