"""The functions that start vLLM, on the demo model: a run, others with its baseline, its checkpoint."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.command import vexport
from vexport.api import Evaluate, compare, evaluate, load, run
from vexport.evaluation.accepted import accept_results
from vexport.types import DryLoadReport, LoadReport

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scenarios" / "demo"
SCHEMA = json.loads((ROOT / "vexport" / "reports" / "compare.schema.json").read_text())
SCHEMES = ("FP8_DYNAMIC", "W4A16")
SCENARIO: dict[str, Any] = {
    "name": "tiny",
    "source": str(DEMO / "model"),
    "rules": [
        {"match": "re:.*layers[.]0[.].*", "scheme": "keep"},
        {"match": "Linear", "scheme": "FP8_DYNAMIC"},
    ],
    "calibration": {"data": str(DEMO / "calibration.jsonl"), "samples": 8, "seq_len": 128},
    "evaluate": {"tasks": [str(DEMO / "tasks" / "addition.yaml")], "limit": 40, "margin": 0.2},
}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first run is in the folder `runs` next to it."""
    path = tmp_path_factory.mktemp("engines") / "tiny.yaml"
    path.write_text(yaml.safe_dump(SCENARIO))
    return path


@pytest.mark.vllm
@pytest.mark.slow
def test_schemes_are_compared_and_the_baseline_is_served_once(scenario: Path) -> None:
    out = scenario.parent / "runs"
    report = run(scenario, run_dir=out / "FP8_DYNAMIC")
    before = (out / "FP8_DYNAMIC" / "load.json").stat().st_mtime_ns
    rows = compare(DEMO / "model", SCHEMES, scenario=scenario, run_dir=out)
    assert (out / "FP8_DYNAMIC" / "load.json").stat().st_mtime_ns == before
    assert [row.schemes for row in rows] == list(SCHEMES)
    assert rows[0].outcome == report.outcome
    call = ("compare", DEMO / "model", "--schemes", "fp8_dynamic,W4A16", "--scenario", scenario)
    ran = vexport(*call, "--run-dir", out, "--quiet", "--format", "json")
    found = json.loads(ran.stdout)
    jsonschema.validate(found, SCHEMA)
    assert [row["mean_kl"] for row in found] == [row.mean_kl for row in rows]
    passed = [row for row in found if row["outcome"] == "PASS"]
    assert ran.code == (0 if passed else 3), ran.stderr
    assert [row for row in found if row["smallest"]] == sorted(passed, key=lambda row: row["num_bytes"])[:1]
    for row in found:
        assert row["mean_kl"] > 0
        assert row["worst"]["low"] <= row["worst"]["difference"] <= row["worst"]["high"]
        assert row["folder"] == str(out / row["schemes"])
    runs = [json.loads((Path(row["folder"]) / "stages.json").read_text()) for row in found]
    assert len({json.dumps(run["stages"]["serve baseline"]) for run in runs}) == 1, "made once"
    plan = json.loads((out / "W4A16" / "plan.json").read_text())
    assert all("layers.0." not in group["name"] for group in plan["groups"]), "what a rule keeps is kept"
    reports = vexport("report", *(out / scheme for scheme in SCHEMES), "--format", "json")
    assert json.loads(reports.stdout) == found


@pytest.mark.vllm
@pytest.mark.slow
def test_a_checkpoint_is_loaded_and_compared_with_an_accepted_baseline(
    scenario: Path, tmp_path: Path
) -> None:
    done = scenario.parent / "runs" / "FP8_DYNAMIC"
    if not done.is_dir():
        run(scenario, run_dir=done)
    loaded = load(done / "checkpoint")
    assert isinstance(loaded, LoadReport)
    assert loaded.ok
    assert loaded.logprobs is not None
    assert 0 < loaded.logprobs.mean_kl < 0.1
    dry = load(done / "checkpoint", dry=True, gpu=["h100"])
    assert isinstance(dry, DryLoadReport)
    assert [(cell.sm, cell.status) for cell in dry.cells] == [(90, "loads")]
    assert [room.gpu for room in dry.rooms] == ["H100"]
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    accept_results(done / "eval" / "candidate", old, {})
    settings = Evaluate(**SCENARIO["evaluate"])
    verdict = evaluate(done / "checkpoint", settings, tmp_path / "results", against=old, accept=new)
    assert verdict is not None
    assert [(verdict.outcome, task.difference) for task in verdict.tasks] == [("PASS", 0)]
    assert json.loads(new.read_text())["tasks"] == json.loads(old.read_text())["tasks"]
