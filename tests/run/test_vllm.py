"""The main job in the real vLLM: schemes of the demo model, and whole scenarios."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.command import Ran, vexport
from tests.evaluation.test_lm_eval_runner import answers_in
from vexport.run.directory import KIND

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scenarios" / "demo"
WEIGHT_ONLY_KL = 0.003
QUANTIZED_INPUTS_KL = 0.1
SCHEMES = {
    "NVFP4": QUANTIZED_INPUTS_KL,
    "FP8": QUANTIZED_INPUTS_KL,
    "W4A16": WEIGHT_ONLY_KL,
}
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize(("scheme", "limit"), SCHEMES.items())
def test_vllm_agrees_with_the_dequantized_reference(scheme: str, limit: float, tmp_path: Path) -> None:
    out = tmp_path / scheme
    # tests/rounding/test_in_vllm.py has all schemes refitted.
    calibration = ("--calibration", DEMO / "calibration.jsonl", "--samples", 16, "--rounding", "nearest")
    ran = vexport("quantize", DEMO / "model", out, "--scheme", scheme, *calibration, "--quiet")
    assert ran.code == 0, ran.stderr
    ran = vexport("load", out, "--format", "json", "--quiet")
    assert ran.code == 0, ran.stderr
    (report,) = json.loads(ran.stdout)
    agreement, engine = report["logprobs"], report["engine"]
    print(f"{scheme}: mean KL {agreement['mean_kl']:.2g}; {engine['kernels'][0]}")
    assert report["ok"], report["findings"]
    assert 0 < agreement["mean_kl"] < limit
    assert agreement["positions"] >= 100
    assert not engine["multiprocess"], "one import of vLLM is enough"
    assert len(engine["kernels"]) == 4
    assert engine["blind_spots"]
    assert engine["emulated"] or not scheme.startswith("NVFP4")


def shortened(scenario: str, folder: Path, limit: int) -> Path:
    """A committed scenario with absolute paths and fewer documents."""
    content = yaml.safe_load((ROOT / "scenarios" / f"{scenario}.yaml").read_text())
    text = json.dumps({**content, "evaluate": {**content["evaluate"], "limit": limit}})
    path = folder / f"{scenario}.yaml"
    path.write_text(re.sub(r'"demo/', f'"{DEMO}/', text))
    return path


def report_of(folder: Path) -> dict[str, object]:
    report: dict[str, object] = json.loads((folder / "report.json").read_text())
    schema = json.loads((ROOT / "vexport" / "reports" / "report.schema.json").read_text())
    jsonschema.validate(report, schema)
    KIND.require_replaceable(folder, overwrite=True)  # raises where a run writes what its list lacks
    return report


def run(scenario: Path, folder: Path) -> Ran:
    return vexport("run", scenario, "--run-dir", folder, "--quiet")


def kill_while_answering(scenario: Path, folder: Path) -> int:
    """Kill a run whose baseline has given answers; how many lm-eval's cache holds."""
    command = [sys.executable, "-m", "vexport", "run", str(scenario), "--run-dir", str(folder), "--quiet"]
    with subprocess.Popen(command) as process:
        while not answers_in(folder / "eval" / "baseline"):
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.1)
        process.kill()
    time.sleep(1)  # its engine ends
    return answers_in(folder / "eval" / "baseline")


def test_the_demo_passes_and_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    scenario = ROOT / "scenarios" / "demo-nvfp4.yaml"
    held = kill_while_answering(scenario, folder)
    ran = run(scenario, folder)
    assert ran.code == 0, ran.stderr
    log = (folder / "eval" / "baseline" / "vllm.log").read_text()
    first = re.search(r"Cached requests: (\d+), Requests remaining: (\d+)", log)
    assert first is not None
    # A generated answer is held under two keys.
    assert tuple(map(int, first.groups())) == (held // 2, 2022 - held // 2)
    assert not list(folder.glob("eval/*/answers-*"))
    assert ran.stdout.startswith(
        "PASS on CPU, emulated  demo-nvfp4\nAll 4 tasks lose less than 2 points (worst: "
    )
    names = (
        "plan.json",
        "check.json",
        "load.json",
        "report.html",
        "report.md",
        "junit.xml",
        "scenario.yaml",
        "checkpoint/config.json",
    )
    assert all((folder / name).is_file() for name in names)
    report = report_of(folder)
    assert (report["source_name"], report["source"]) == ("demo", "scenarios/demo/model")
    links = re.findall(r'href="([^#"]*)"', (folder / "report.html").read_text(encoding="utf-8"))
    assert {"checkpoint/", "scenario.yaml", "report.json", "eval/candidate/vllm.log"} <= set(links)
    assert all((folder / link).exists() for link in links)
    verdict = report["verdict"]
    assert isinstance(verdict, dict)
    assert {task["task"] for task in verdict["tasks"]} == {
        "addition",
        "addition_choice",
        "facts",
        "facts_choice",
    }
    assert sum(task["documents"] for task in verdict["tasks"]) == 4044

    written = {path: path.stat().st_mtime_ns for path in (folder / "checkpoint").iterdir()}
    assert run(scenario, folder).code == 0
    assert {path: path.stat().st_mtime_ns for path in (folder / "checkpoint").iterdir()} == written

    results = [folder / "eval" / role for role in ("baseline", "candidate")]
    again = json.loads(vexport("verdict", *results, "--format", "json").stdout)
    assert again["tasks"] == verdict["tasks"]
    assert vexport("report", folder, "--format", "junit").stdout.startswith("<?xml")

    other = yaml.safe_load(scenario.read_text()) | {"source": str(DEMO / "model-x8")}
    changed = tmp_path / "changed.yaml"
    changed.write_text(json.dumps(other).replace('"demo/', f'"{DEMO}/'))
    refused = run(changed, folder)
    assert refused.code == 2
    assert "another source" in refused.errors[0]
    otherwise = vexport("run", scenario, "--run-dir", folder, "--quiet", "--max-num-seqs", "8")
    assert otherwise.code == 2
    assert "another serve section" in otherwise.errors[0]
    log = (folder / "vexport.log").read_text(encoding="utf-8")
    lines = ("quantize: done before", "vLLM on ", "InputError: ", "vexport run ")
    assert all(line in log for line in lines), log


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of run directories."""
    return tmp_path_factory.mktemp("runs")


def test_int4_on_outliers_fails_and_says_why(tmp_path: Path, runs: Path) -> None:
    ran = run(shortened("demo-hard-int4", tmp_path, 300), runs / "int4")
    assert ran.code == 1
    (line,) = ran.errors
    assert "FAIL" in line
    assert "worst: addition" in ran.stdout
    assert report_of(runs / "int4")["outcome"] == "FAIL"
    assert "FAIL" in (runs / "int4" / "report.html").read_text()


def test_after_a_failed_load_the_answers_are_shown_and_decide_nothing(tmp_path: Path, runs: Path) -> None:
    """A load gate is failed by hand: what does it in vLLM would need an engine more."""
    folder = tmp_path / "run"
    if not (runs / "int4").is_dir():
        assert run(shortened("demo-hard-int4", tmp_path, 300), runs / "int4").code == 1
    shutil.copytree(runs / "int4", folder)
    shutil.copyfile(folder / "scenario.yaml", scenario := tmp_path / "again.yaml")
    load = json.loads((folder / "load.json").read_text())
    finding = {
        "check": "canary",
        "severity": "error",
        "where": "a prompt",
        "got": "a loop",
        "fix": "a finer scheme",
    }
    load |= {"ok": False, "findings": [{**finding, "expected": "text"}]}
    (folder / "load.json").write_text(json.dumps(load))
    ran = run(scenario, folder)
    assert ran.code == 1
    assert "load: a prompt" in ran.stdout
    report = report_of(folder)
    verdict = report["verdict"]
    assert isinstance(verdict, dict)
    assert {task["documents"] for task in verdict["tasks"]} == {300}
    assert "evaluate" not in (folder / "report.md").read_text()
    for name in ("report.md", "report.html"):
        text = (folder / name).read_text()
        assert "what it answered is for information" in text


def test_the_same_function_is_indistinguishable(tmp_path: Path, runs: Path) -> None:
    ran = run(shortened("demo-outliers", tmp_path, 300), runs / "outliers")
    assert ran.code == 0, ran.stderr
    verdict = report_of(runs / "outliers")["verdict"]
    assert isinstance(verdict, dict)
    for task in verdict["tasks"]:
        assert task["documents"] == 300
        assert task["difference"] == 0
        assert task["right_to_wrong"] == task["wrong_to_right"] == task["changed_wrong"] == 0
