"""A scenario of the severity ladder in the real vLLM."""

import json
from pathlib import Path

import pytest

from tests.command import vexport

SCENARIOS = Path(__file__).parents[2] / "scenarios"
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_rung_ends_as_its_file_says(tmp_path: Path) -> None:
    """One of the twelve; scenarios/ladder/README.md has what all of them measured."""
    scenario = SCENARIOS / "ladder" / "int4-g128-x8.yaml"
    assert "Meant to end with FAIL." in scenario.read_text()
    ran = vexport("run", scenario, "--run-dir", tmp_path / "run", "--quiet")
    assert ran.code == 1, ran.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["outcome"] == "FAIL"
    assert report["attribution"]["guilty"] == "quantization"
    assert report["drift"]["prompts"] == 16
    assert report["drift"]["mean_kl"] > 0
