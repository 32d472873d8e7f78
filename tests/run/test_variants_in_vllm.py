"""One checkpoint in several settings of the real vLLM, in a command and in a scenario."""

import json
from pathlib import Path

import pytest
import yaml

from tests.command import ROOT, vexport
from vexport.run.directory import KIND

DEMO = ROOT / "scenarios" / "demo"
TEXT = {"text": str(DEMO / "calibration.jsonl"), "text_rows": 12, "text_tokens": 64}
# Positions of a model that was trained with a base of 10,000.
WRONG_BASE = {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e8}}}
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_settings_of_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ("{}", "max_num_seqs=2", "kv_cache_dtype=fp9", json.dumps(WRONG_BASE))
    served = [word for setting in settings for word in ("--serve", setting)]
    text = [word for key, value in TEXT.items() for word in (f"--{key.replace('_', '-')}", value)]
    call = ("compare", DEMO / "model", *served, *text, "--run-dir", folder, "--format", "json")
    ran = vexport(*call, "--quiet")
    rows = json.loads(ran.stdout)
    outcomes = ["BASELINE", "PASS", "REFUSED", "FAIL"]
    assert [row["outcome"] for row in rows] == outcomes, ran.stderr
    assert ran.code == 1
    assert rows[1]["mean_kl"] < 1e-3 < 0.1 < rows[3]["mean_kl"]
    assert "fp8" in rows[2]["reason"]
    assert rows[0]["vllm"]
    sessions = {file: file.stat().st_mtime_ns for file in folder.rglob("session.json")}
    assert len(sessions) == 3
    again = vexport(*call, "--quiet")
    assert (again.code, json.loads(again.stdout)) == (1, rows)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("session.json")} == sessions


def test_variants_of_a_scenario(tmp_path: Path) -> None:
    content = {
        "name": "served",
        "source": str(DEMO / "model"),
        "rules": [{"match": "Linear", "scheme": "FP8_DYNAMIC"}],
        "evaluate": TEXT,
        "variants": [{}, {"max_num_seqs": 2}],
    }
    path = tmp_path / "served.yaml"
    path.write_text(yaml.safe_dump(content))
    folder = tmp_path / "run"
    ran = vexport("run", path, "--run-dir", folder, "--quiet")
    assert ran.code == 0, ran.stderr
    report = json.loads((folder / "report.json").read_text())
    assert [row["outcome"] for row in report["variants"]] == ["BASELINE", "PASS"]
    assert "variants: the variant passes" in report["reason"]
    assert [*(folder / "variants" / "candidate").glob("max_num_seqs=2-*/session.json")]
    assert "Settings and versions of vLLM" in (folder / "report.html").read_text()
    KIND.require_replaceable(folder, overwrite=True)  # the list of files is complete
