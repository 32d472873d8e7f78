"""Held-out text and tasks decide in the real vLLM; the scores come before what explains them."""

import json
from pathlib import Path

import pytest
import yaml

from tests.command import vexport
from tests.evaluation.faults import DEMO, quantized, with_swapped_scales

TEXT = DEMO / "calibration.jsonl"
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def scenario(folder: Path, **limits: float) -> Path:
    content = {
        "name": "text",
        "source": str(DEMO / "model"),
        "rules": [{"match": "Linear", "scheme": "FP8_DYNAMIC"}],
        "evaluate": {"text": str(TEXT), "text_rows": 12, "text_tokens": 64, **limits},
    }
    path = folder / "text.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_text_decides_in_the_place_of_tasks(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ran = vexport("run", scenario(tmp_path), "--run-dir", folder, "--quiet")
    assert ran.code == 0, ran.stderr
    report = json.loads((folder / "report.json").read_text())
    text = report["verdict"]["text"]
    assert (text["rows"], text["tokens"], text["positions"]) == (12, 12 * 63, 12 * 63)
    assert [limit["outcome"] for limit in text["limits"]] == ["PASS", "PASS"]
    assert 0 < text["limits"][0]["value"] == pytest.approx(report["drift"]["mean_kl"], rel=1e-6)
    assert text["baseline_nll"] == pytest.approx(report["drift"]["baseline_nll"], abs=1e-3)
    assert 0.5 < text["top1_agreement"] <= 1
    assert not list(folder.rglob("results_*.json"))
    for name in ("report.html", "report.md", "model-card.md", "junit.xml"):
        assert "KL to the baseline" in (folder / name).read_text()
    assert "never decides" not in (folder / "report.html").read_text()
    again = vexport("run", scenario(tmp_path, kl_limit=1e-6), "--run-dir", folder, "--quiet")
    assert again.code == 1, "other limits, the same sessions"
    assert "KL to the baseline" in again.stdout


def test_drafts_of_the_same_model_are_accepted_alike(tmp_path: Path) -> None:
    model = DEMO / "model"
    command = ("eval", model, "--baseline", model, "--text", TEXT, "--text-rows", "10", "--text-tokens", "64")
    drafting = ("--speculative", "ngram", "--format", "json", "--output-dir", tmp_path / "out")
    done = vexport(*command, *drafting)
    assert done.code == 0, done.stderr
    text = json.loads(done.stdout)["text"]
    acceptance, fall = text["acceptance"], text["limits"][2]
    assert acceptance["baseline"] == acceptance["candidate"] > 1
    assert 1 <= acceptance["draft_tokens"][0] <= 3
    assert (fall["outcome"], fall["value"]) == ("PASS", 0)


def test_scores_come_first_and_the_cause_of_a_loss_after_them(tmp_path: Path) -> None:
    tasks = f"{DEMO}/tasks/addition.yaml,{DEMO}/tasks/facts.yaml"
    out, broken = tmp_path / "out", with_swapped_scales(quantized(tmp_path / "whole"), tmp_path / "broken")
    ran = vexport(
        *("eval", DEMO / "model", broken, "--baseline", DEMO / "model"),
        *("--tasks", tasks, "--limit", "100", "--margin", "0.05", "--output-dir", out, "--quiet"),
    )
    assert ran.code == 1, ran.stderr
    table, _, cause = ran.stdout.partition(f"\n{broken}\n")
    assert f"{DEMO}/model *" in table
    assert "addition loses" in table
    assert cause.startswith("cause         the quantization: the exported weights are")
    # Nothing explains a pass.
    assert not (out / "candidate" / "1-model" / "reference.safetensors").exists()
    assert (out / "candidate" / "2-broken" / "reference.safetensors").exists()
