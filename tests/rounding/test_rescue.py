"""The scenario that shows a rescue: what it writes, next to the same bits rounded to nearest."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.command import vexport
from vexport.engine.reference import reference_logprobs
from vexport.numerics.metrics import kl_divergence

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


@pytest.mark.slow
def test_refit_leaves_a_quarter_of_the_divergence(tmp_path: Path) -> None:
    scenario = yaml.safe_load((SCENARIOS / "demo-rescue-int4.yaml").read_text())
    rung = yaml.safe_load((SCENARIOS / "ladder" / "int4-g128-x8.yaml").read_text())
    layers, same = scenario["rules"][-1], rung["rules"][-1]
    assert {**same, "rounding": "refit"} == layers
    source, data = SCENARIOS / scenario["source"], SCENARIOS / scenario["calibration"]["data"]
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = [tokenizer(json.loads(line)["text"])["input_ids"] for line in data.read_text().splitlines()[-8:]]
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.inference_mode():
        exact = torch.cat([model(torch.tensor([row])).logits[0, :-1].float() for row in rows])
    left, options = [], ("--scheme", layers["scheme"], "--calibration", data, "--samples", 64)
    for rounding in ("nearest", layers["rounding"]):
        ran = vexport("quantize", source, tmp_path / rounding, *options, "--rounding", rounding)
        assert ran.code == 0, ran.stderr
        logprobs = reference_logprobs(tmp_path / rounding, rows)
        left.append(float(kl_divergence(torch.log_softmax(exact, dim=-1), logprobs).mean()))
    assert 0 < left[1] < left[0] / 4
