"""What `vexport compare` refuses; tests/api/test_engines.py has what it does."""

from pathlib import Path

import pytest
import yaml

from tests.command import vexport

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scenarios" / "demo"
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
