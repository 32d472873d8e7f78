"""`vexport compare`: a run for each scheme, the baseline served once, and one table."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.command import vexport

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scenarios" / "demo"
SCHEMA = json.loads((ROOT / "vexport" / "reports" / "compare.schema.json").read_text())
SCENARIO = {
    "name": "tiny",
    "source": str(DEMO / "model"),
    "rules": [{"match": "re:.*layers[.]0[.].*", "scheme": "keep"}, {"match": "Linear", "scheme": "FP8"}],
    "calibration": {"data": str(DEMO / "calibration.jsonl"), "samples": 8, "seq_len": 128},
    "evaluate": {"tasks": [str(DEMO / "tasks" / "addition.yaml")], "limit": 40, "margin": 0.2},
}


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(SCENARIO))
    return path


@pytest.mark.vllm
@pytest.mark.slow
def test_schemes_are_compared_and_the_baseline_is_served_once(scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "compared"
    call = ("compare", DEMO / "model", "--schemes", "w4a16,FP8_DYNAMIC", "--scenario", scenario)
    options = ("--run-dir", out, "--quiet", "--format", "json")
    ran = vexport(*call, *options)
    found = json.loads(ran.stdout)
    jsonschema.validate(found, SCHEMA)
    assert [row["schemes"] for row in found] == ["W4A16", "FP8_DYNAMIC"]
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
    before = (out / "W4A16" / "load.json").stat().st_mtime_ns
    again = vexport(*call, *options)
    assert (again.code, again.stdout) == (ran.code, ran.stdout)
    assert (out / "W4A16" / "load.json").stat().st_mtime_ns == before
    reports = vexport("report", out / "W4A16", out / "FP8_DYNAMIC", "--format", "json")
    assert json.loads(reports.stdout) == found


@pytest.mark.vllm
def test_a_scheme_that_no_run_comes_of_is_an_error_where_there_is_no_other(
    scenario: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    ran = vexport(
        "compare", missing, "--schemes", "W4A16", "--scenario", scenario, "--run-dir", tmp_path / "c"
    )
    assert ran.code == 2
    assert "missing" in ran.stderr
    foreign = tmp_path / "W4A16"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    ran = vexport("compare", DEMO / "model", "--schemes", "W4A16", "--run-dir", tmp_path, "--overwrite")
    assert ran.code == 2
    assert "did not make" in ran.stderr
    assert (foreign / "notes.txt").exists()


def test_an_unknown_scheme_is_a_usage_error() -> None:
    ran = vexport("compare", DEMO / "model", "--schemes", "W4A17")
    assert ran.code == 2
    assert "W4A17" in ran.stderr


@pytest.mark.vllm
def test_a_source_that_is_not_there_is_named_as_by_every_command(tmp_path: Path) -> None:
    ran = vexport("compare", tmp_path / "nothing", "--schemes", "W4A16", "--run-dir", tmp_path / "runs")
    assert ran.code == 2
    assert f"{tmp_path / 'nothing'}: got no such folder, need a checkpoint folder" in ran.errors[-1]
