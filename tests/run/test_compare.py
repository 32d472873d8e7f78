"""`vexport compare`: a run for each scheme, the baseline served once, and one page."""

import json
import re
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
    "speed": {"concurrency": [1, 4], "input_len": 16, "output_len": 8},
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
    schemes = "w4a16,NVFP4A16,FP8_DYNAMIC"
    call = ("compare", DEMO / "model", "--schemes", schemes, "--scenario", scenario, "--run-dir", out)
    options = ("--gpu", "H100", "--context", 512, "--quiet")
    ran = vexport(*call, *options, "--format", "json")
    assert ran.code in (0, 3), ran.stderr
    found = json.loads(ran.stdout)
    jsonschema.validate(found, SCHEMA)
    assert found == json.loads((out / "compare.json").read_text())
    rows = {row["scheme"]: row for row in found["schemes"]}
    assert list(rows) == ["W4A16", "NVFP4A16", "FP8_DYNAMIC"]
    assert (ran.code == 0) == (found["recommended"] in rows)
    # Two are emulated on a CPU and have no measured speed: all are compared by the bound.
    assert [len(rows[name]["points"]) for name in rows] == [2, 0, 0]
    assert "emulated" in rows["NVFP4A16"]["unmeasured"]
    assert found["speed_kind"] == "bound"
    assert [len(row["rates"]) for row in rows.values()] == [3, 3, 3]
    assert len(found["baseline"]["points"]) == 2
    for row in rows.values():
        assert row["mean_kl"] > 0
        assert row["recovery_low"] <= row["recovery"] <= row["recovery_high"]
        assert row["bits_per_weight"] < found["baseline"]["bits_per_weight"]
    runs = {name: json.loads((out / row["folder"] / "stages.json").read_text()) for name, row in rows.items()}
    for stage in ("serve baseline", "time baseline"):
        assert len({json.dumps(run["stages"][stage]) for run in runs.values()}) == 1, "made once"
    page = (out / "compare.html").read_text()
    assert page.count('<figure class="plane named"') == 3
    assert 'href="schemes/W4A16/report.html"' in page
    plan = json.loads((out / "schemes" / "W4A16" / "plan.json").read_text())
    assert all("layers.0." not in group["name"] for group in plan["groups"]), "what a rule keeps is kept"
    before = (out / "schemes" / "W4A16" / "load.json").stat().st_mtime_ns
    again = vexport(*call, *options)
    assert again.code == ran.code, again.stderr
    assert (out / "schemes" / "W4A16" / "load.json").stat().st_mtime_ns == before
    assert re.search(r"^NVFP4A16 .*emulated", again.stdout, re.MULTILINE)
    refused = vexport(*call, "--gpu", "L40S,H100")
    assert (refused.code, "name one" in refused.stderr) == (2, True)


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
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    ran = vexport("compare", DEMO / "model", "--schemes", "W4A16", "--run-dir", foreign, "--overwrite")
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
