"""A scenario of the severity ladder in the real vLLM, and an evaluation that ends when it is decided."""

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


def test_the_early_end_reads_a_part_and_says_when(tmp_path: Path) -> None:
    ran = vexport("run", SCENARIOS / "demo-early.yaml", "--run-dir", tmp_path / "run")
    assert ran.code == 0, ran.stderr
    verdict = json.loads((tmp_path / "run" / "report.json").read_text())["verdict"]
    for task in verdict["tasks"]:
        looks = [look for look in verdict["looks"] if look["task"] == task["task"]]
        assert looks[-1]["read"] == task["documents"] < looks[-1]["of"] / 2
        assert looks[-1]["outcome"] == "PASS"
    assert "reading addition [" in ran.stderr
