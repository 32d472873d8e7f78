"""Scenarios, comparisons, and functions that start the real vLLM."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.command import Ran, vexport
from tests.texts import assert_contains
from vexport.api import Evaluate, compare, evaluate, load
from vexport.judge.accepting import accept_results
from vexport.records import DryLoadReport
from vexport.records.report import ComparedRun
from vexport.run.directory import KIND

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scenarios" / "demo"
COMPARISON = json.loads((ROOT / "vexport" / "reports" / "compare.schema.json").read_text())
SCHEMES = ("W4A16", "FP8_DYNAMIC")
LIMIT = 300
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def limit_scenario(name: str, folder: Path) -> Path:
    """Return a committed scenario with absolute paths and fewer documents."""
    content = yaml.safe_load((ROOT / "scenarios" / name).read_text())
    text = json.dumps({**content, "evaluate": {**content["evaluate"], "limit": LIMIT}})
    path = folder / name
    path.write_text(text.replace('"demo/', f'"{DEMO}/'))
    return path


@pytest.fixture(scope="module")
def hard_scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a scenario whose runs are in the folder `runs`."""
    return limit_scenario("demo-hard-int4.yaml", tmp_path_factory.mktemp("hard"))


@pytest.fixture(scope="module")
def failed_run(hard_scenario: Path) -> Ran:
    """Return the failing run: INT4 of a model with outliers."""
    return run(hard_scenario, hard_scenario.parent / "runs" / "W4A16")


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    schema = json.loads((ROOT / "vexport" / "reports" / "report.schema.json").read_text())
    jsonschema.validate(report, schema)
    KIND.require_replaceable(
        folder, overwrite=True
    )  # raises if the folder has a file that is missing in the run's list
    return report


def run(scenario: Path, folder: Path) -> Ran:
    return vexport("run", scenario, "--run-dir", folder, "--quiet")


def answers_in(folder: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in folder.glob("answers-*.jsonl"))


def kill_while_answering(scenario: Path, folder: Path) -> int:
    """Kill a run after its baseline has answered some prompts.

    Return the number of answers on disk.
    """
    command = [
        sys.executable,
        "-m",
        "vexport",
        "run",
        str(scenario),
        "--run-dir",
        str(folder),
        "--quiet",
    ]
    with subprocess.Popen(command) as process:
        while not answers_in(folder / "eval" / "baseline"):
            assert process.poll() is None, "the run ended before it was killed"
            time.sleep(0.1)
        process.kill()
    # The engine ends after the run. Until then, it may store more answers.
    count = -1
    while count != answers_in(folder / "eval" / "baseline"):
        count = answers_in(folder / "eval" / "baseline")
        time.sleep(2)
    return count


def test_demo_passes_and_resumes(tmp_path: Path) -> None:
    folder, scenario = tmp_path / "run", limit_scenario("demo-nvfp4.yaml", tmp_path)
    held = kill_while_answering(scenario, folder)
    ran = run(scenario, folder)
    assert ran.code == 0, ran.stderr
    log = (folder / "eval" / "baseline" / "vllm.log").read_text()
    # vLLM generates text for two tasks first. A slow kill also stores scores of the other two.
    generated = min(held, 2 * LIMIT)
    assert f"{generated} of {2 * LIMIT} responses are kept" in log
    assert not list(folder.glob("eval/*/answers-*"))
    assert ran.stdout.startswith("PASS on CPU, emulated  demo-nvfp4\n")
    assert_contains(ran.stdout, "All 4 tasks", "2 points")
    names = ["plan.json", "check.json", "load.json", "report.html", "report.md", "junit.xml"]
    names += ["scenario.yaml", "checkpoint/config.json"]
    assert all((folder / name).is_file() for name in names)
    report = report_of(folder)
    source = report["made"]["source"]
    assert (source["id"], source["name"]) == ("demo", "scenarios/demo/model")
    links = re.findall(r'href="([^#"]*)"', (folder / "report.html").read_text(encoding="utf-8"))
    assert {"checkpoint/", "scenario.yaml", "report.json", "eval/candidate/vllm.log"} <= set(links)
    assert all((folder / link).exists() for link in links)
    verdict = report["verdict"]
    tasks = {task["task"] for task in verdict["tasks"]}
    assert tasks == {"addition", "addition_choice", "facts", "facts_choice"}
    assert {task["documents"] for task in verdict["tasks"]} == {LIMIT}

    written = {path: path.stat().st_mtime_ns for path in (folder / "checkpoint").iterdir()}
    assert run(scenario, folder).code == 0
    assert {path: path.stat().st_mtime_ns for path in (folder / "checkpoint").iterdir()} == written

    results = [folder / "eval" / role for role in ("baseline", "candidate")]
    again = json.loads(vexport("verdict", *results, "--format", "json").stdout)
    assert again["tasks"] == verdict["tasks"]
    assert vexport("report", folder, "--format", "junit").stdout.startswith("<?xml")

    other = json.loads(scenario.read_text()) | {"source": str(DEMO / "model-x8")}
    changed = tmp_path / "changed.yaml"
    changed.write_text(json.dumps(other))
    refused = run(changed, folder)
    assert refused.code == 2
    assert "another source" in refused.errors[0]
    otherwise = vexport("run", scenario, "--run-dir", folder, "--quiet", "--max-num-seqs", "8")
    assert otherwise.code == 2
    assert "another `serve`" in otherwise.errors[0]
    log = (folder / "vexport.log").read_text(encoding="utf-8")
    lines = ("quantize: done before", "vLLM on ", "InputError: ", "vexport run ")
    assert all(line in log for line in lines), log


def test_int4_on_outliers_fails_with_cause(hard_scenario: Path, failed_run: Ran) -> None:
    folder = hard_scenario.parent / "runs" / "W4A16"
    assert failed_run.code == 1
    (line,) = failed_run.errors
    assert "FAIL" in line
    assert "worst: addition" in failed_run.stdout
    report = report_of(folder)
    assert (report["outcome"], report["attribution"]["guilty"]) == ("FAIL", "quantization")
    assert report["drift"]["prompts"] == 16
    assert report["drift"]["mean_kl"] > 0
    assert "FAIL" in (folder / "report.html").read_text()


@pytest.mark.usefixtures("failed_run")
def test_answers_after_failed_load_decide_nothing(hard_scenario: Path, tmp_path: Path) -> None:
    """The load report is edited to fail, because a failing load would need another engine start."""
    folder = Path(shutil.copytree(hard_scenario.parent / "runs" / "W4A16", tmp_path / "run"))
    load = json.loads((folder / "load.json").read_text())
    finding = {
        "check": "canary",
        "severity": "error",
        "where": "a prompt",
        "got": "a loop",
        "fix": "no",
    }
    load |= {"ok": False, "findings": [{**finding, "expected": "text"}]}
    (folder / "load.json").write_text(json.dumps(load))
    ran = run(hard_scenario, folder)
    assert ran.code == 1
    assert "load: a prompt" in ran.stdout
    assert {task["documents"] for task in report_of(folder)["verdict"]["tasks"]} == {LIMIT}
    assert "evaluate" not in (folder / "report.md").read_text()
    for name in ("report.md", "report.html"):
        assert "shown only for information" in (folder / name).read_text()


@pytest.fixture(scope="module")
def rows(hard_scenario: Path, failed_run: Ran) -> Sequence[ComparedRun]:
    """Compare a second scheme with the finished run, using the function `compare`."""
    out = hard_scenario.parent / "runs"
    before = (out / "W4A16" / "load.json").stat().st_mtime_ns
    compared = compare(DEMO / "model-x16", SCHEMES, scenario=hard_scenario, run_dir=out)
    assert (out / "W4A16" / "load.json").stat().st_mtime_ns == before
    return compared


def test_compare_serves_baseline_once(hard_scenario: Path, rows: Sequence[ComparedRun]) -> None:
    source, out = DEMO / "model-x16", hard_scenario.parent / "runs"
    assert [(row.schemes, row.outcome) for row in rows] == [
        ("W4A16", "FAIL"),
        ("FP8_DYNAMIC", "PASS"),
    ]
    call = (
        "compare",
        source,
        "--schemes",
        "w4a16,FP8_DYNAMIC",
        "--scenario",
        hard_scenario,
        "--run-dir",
        out,
    )
    ran = vexport(*call, "--quiet", "--format", "json")
    assert ran.code == 0, ran.stderr
    shown = json.loads(ran.stdout)
    jsonschema.validate(shown, COMPARISON)
    assert [row["mean_kl"] for row in shown] == [row.mean_kl for row in rows]
    assert [row["schemes"] for row in shown if row["smallest"]] == ["FP8_DYNAMIC"]
    for row in shown:
        assert row["mean_kl"] > 0
        assert row["worst"]["low"] <= row["worst"]["difference"] <= row["worst"]["high"]
        assert row["folder"] == str(out / row["schemes"])
    stages = [
        json.loads((Path(row["folder"]) / "stages.json").read_text())["stages"] for row in shown
    ]
    assert len({json.dumps(each["serve baseline"]) for each in stages}) == 1, (
        "the baseline was evaluated again"
    )
    reports = vexport("report", *(out / scheme for scheme in SCHEMES), "--format", "json")
    assert json.loads(reports.stdout) == shown


@pytest.mark.usefixtures("rows")
def test_load_and_evaluate_functions(hard_scenario: Path, tmp_path: Path) -> None:
    """Load a checkpoint dry, and evaluate it against an accepted baseline."""
    done = hard_scenario.parent / "runs" / "FP8_DYNAMIC"
    dry = load(done / "checkpoint", dry=True, gpu=["h100"])
    assert isinstance(dry, DryLoadReport)
    assert [(cell.sm, cell.status) for cell in dry.cells] == [(90, "loads")]
    assert [room.gpu for room in dry.rooms] == ["H100"]
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    accept_results(done / "eval" / "candidate", old, {})
    tasks = tuple(str(DEMO / "tasks" / f"{name}.yaml") for name in ("addition", "facts"))
    settings = Evaluate(tasks=tasks, limit=LIMIT, margin=0.2)
    verdict = evaluate(done / "checkpoint", settings, tmp_path / "results", against=old, accept=new)
    assert verdict is not None
    assert [(verdict.outcome, task.difference) for task in verdict.tasks] == [("PASS", 0)] * 2
    assert json.loads(new.read_text())["tasks"] == json.loads(old.read_text())["tasks"]
