"""INT4 on outliers fails in the real vLLM; with more bits for the guiltiest groups it passes."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.command import Ran, vexport

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scenarios" / "demo"
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def shortened(folder: Path) -> Path:
    """The committed scenario with absolute paths and fewer documents and samples."""
    content = yaml.safe_load((ROOT / "scenarios" / "demo-until-pass.yaml").read_text())
    content["evaluate"]["limit"] = 300
    content["sensitivity"]["samples"] = 2
    path = folder / "scenario.yaml"
    path.write_text(re.sub(r'"demo/', f'"{DEMO}/', json.dumps(content)))
    return path


def run(scenario: Path, folder: Path) -> Ran:
    return vexport("run", scenario, "--run-dir", folder, "--until-pass", "--quiet")


def test_groups_are_promoted_until_it_passes(tmp_path: Path) -> None:
    scenario, folder = shortened(tmp_path), tmp_path / "run"
    ran = run(scenario, folder)
    assert ran.code == 0, ran.stderr
    report = json.loads((folder / "report.json").read_text())
    first, *rounds = report["attempts"]
    assert [one["outcome"] for one in report["attempts"]] == ["FAIL"] * len(rounds) + ["PASS"]
    assert first["promotions"] == []
    assert json.loads((folder / "attempts/1/report.json").read_text())["outcome"] == "FAIL"
    for before, after in zip(report["attempts"], rounds, strict=False):
        price = sum(one["num_bytes"] for one in after["promotions"])
        assert price == after["output_bytes"] - before["output_bytes"] > 0
        assert after["loss"] < before["loss"]
    stored = sum(path.stat().st_size for path in (folder / "checkpoint").glob("*.safetensors"))
    assert 0 <= stored - rounds[-1]["output_bytes"] < 50_000
    assert rounds[-1]["output_bytes"] < 0.75 * report["plan"]["source_bytes"]
    promoted = {one["name"] for attempt in rounds for one in attempt["promotions"]}
    assert any("qkv_proj" in name or "gate_up_proj" in name for name in promoted)
    schemes = {group["name"]: group["scheme"] for group in report["plan"]["groups"]}
    assert set(schemes.values()) == {"W4A16", "FP8_DYNAMIC"}

    written = (folder / "checkpoint/config.json").stat().st_mtime_ns
    assert run(scenario, folder).code == 0
    assert (folder / "checkpoint/config.json").stat().st_mtime_ns == written
