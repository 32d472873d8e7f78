"""Evaluation with held-out text, with tasks, and with a real `vllm serve`."""

import json
from pathlib import Path

import pytest
import yaml

from tests.command import vexport
from tests.judge.faults import DEMO, with_unequal_global_scales
from tests.models import quantize
from tests.run.served import serving
from vexport.inference.endpoint.server import API_KEY

TEXT = DEMO / "calibration.jsonl"
KEY = "sk-of-nobody-else"
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def scenario(folder: Path, **limits: float) -> Path:
    text = {"text": str(TEXT), "text_rows": 12, "text_tokens": 64, "speculative": "ngram"}
    content = {
        "name": "text",
        "source": str(DEMO / "model"),
        "rules": [{"match": "Linear", "scheme": "FP8_DYNAMIC"}],
        "evaluate": {**text, **limits},
    }
    path = folder / "text.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_text_and_drafts_decide_without_tasks(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ran = vexport("run", scenario(tmp_path), "--run-dir", folder, "--quiet")
    assert ran.code == 0, ran.stderr
    report = json.loads((folder / "report.json").read_text())
    text = report["verdict"]["text"]
    assert (text["rows"], text["tokens"]) == (12, 12 * 63)
    assert [limit["outcome"] for limit in text["limits"]] == ["PASS"] * 3
    assert 0 < text["limits"][0]["value"] == pytest.approx(report["drift"]["mean_kl"], rel=1e-6)
    assert text["baseline_nll"] == pytest.approx(report["drift"]["baseline_nll"], abs=1e-3)
    assert 0.5 < text["top1_agreement"] <= 1
    (bucket,) = text["buckets"]
    assert (bucket["start"], bucket["end"], bucket["tokens"]) == (0, 64, 12 * 63)
    assert bucket["noise"] == {
        "rows": 3,
        "kl": pytest.approx(0, abs=1e-3),
        "nll_rise": pytest.approx(0, abs=1e-3),
        "changed": pytest.approx(0, abs=0.02),
    }
    acceptance = text["acceptance"]
    assert 1 < acceptance["candidate"] == pytest.approx(acceptance["baseline"], rel=0.05)
    assert 1 <= acceptance["draft_tokens"][0] <= 3
    assert not list(folder.rglob("results_*.json"))
    for name in ("report.html", "report.md", "model-card.md", "junit.xml"):
        assert "KL to the baseline" in (folder / name).read_text()
    assert "does not change the outcome" not in (folder / "report.html").read_text()
    again = vexport("run", scenario(tmp_path, kl_limit=1e-6), "--run-dir", folder, "--quiet")
    assert again.code == 1, "the limit changes the outcome without a new session"
    assert "KL to the baseline" in again.stdout


def answers(folder: Path) -> list[tuple[object, object, object]]:
    rows = [
        json.loads(line)
        for file in folder.glob("samples_*")
        for line in file.read_text().splitlines()
    ]
    return sorted((row["prompt_hash"], row["doc_id"], row["resps"]) for row in rows)


def test_server_answers_like_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One candidate is a server, the other a folder with unequal global scales.

    Only the folder fails.
    """
    monkeypatch.setenv(API_KEY, KEY)
    tasks = f"{DEMO}/tasks/addition.yaml,{DEMO}/tasks/facts.yaml"
    whole = quantize(DEMO / "model", tmp_path / "whole", "NVFP4A16")
    out, broken = tmp_path / "out", with_unequal_global_scales(whole, tmp_path / "broken")
    log, key = tmp_path / "server.log", {"VLLM_API_KEY": KEY}
    with serving(log, DEMO / "model", environment=key) as url:
        ran = vexport(
            *("eval", url, broken, "--baseline", DEMO / "model", "--output-dir", out, "--quiet"),
            *("--tasks", tasks, "--limit", "100", "--margin", "0.05"),
        )
    assert ran.code == 1, ran.stderr
    table, _, cause = ran.stdout.partition(f"\n{broken}\n")
    assert f"{url} *" in table
    assert "addition loses" in table
    assert cause.startswith("cause         the loader: ")
    assert "global_scale" in cause
    address = url.removeprefix("http://").removesuffix("/v1").replace(":", "-")
    served, engine = out / "candidate" / f"1-{address}", out / "candidate" / "2-broken"
    reports = [json.loads((each / "report.json").read_text()) for each in (served, engine)]
    assert [(each["outcome"], each["load"] is None) for each in reports] == [
        ("PASS", True),
        ("FAIL", False),
    ]
    assert reports[1]["attribution"]["guilty"] == "loader"
    assert answers(out / "baseline") == answers(served)
    assert answers(engine) != answers(served)
    # A pass needs no attribution, so that no reference is computed.
    assert not (served / "reference.safetensors").exists()
    assert (engine / "reference.safetensors").exists()
    files = [file.read_bytes() for file in out.rglob("*") if file.is_file()]
    assert not any(
        KEY.encode() in content for content in (*files, ran.stdout.encode(), ran.stderr.encode())
    )
