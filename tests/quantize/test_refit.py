"""A full refit, compared with brevitas' Qronos. Golden values were recorded.

Qronos chooses the first column with the other columns unchanged, without damping, and refits the
others to it. Here all columns are refitted, then rounded in order. If both round the first column
of a row to the same value, all other columns follow from the same formula.
"""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.command import vexport
from tests.models import save_llama
from tests.quantize.test_rounding import divergence
from vexport.names import Folder
from vexport.numerics.number_formats import integer_format
from vexport.plan.build import PlanSettings
from vexport.plan.source import plan_headers
from vexport.quantize.gptq import (
    GPTQ,
    REFIT_STRENGTHS,
    Factor,
    Grid,
    Strength,
    factorize,
    refit,
    round_columns,
    strength_of,
)
from vexport.quantize.moments import Moments
from vexport.records import silent
from vexport.scenario import Rule

GOLDEN = load_file(Path(__file__).parent / "golden" / "qronos.safetensors")
WEIGHT, HESSIAN, CROSS = GOLDEN["weight"], GOLDEN["hessian"], GOLDEN["cross"]
RIDGE = float(GOLDEN["damping"] / HESSIAN.diagonal().mean())
SCALE = GOLDEN["scale"].repeat_interleave(16, dim=1)


def factor() -> Factor:
    found = factorize(HESSIAN, RIDGE)
    assert found is not None
    return found


def codes(values: torch.Tensor) -> torch.Tensor:
    return torch.round(values / SCALE)


def rounded(strength: float) -> torch.Tensor:
    """Return the weight in 4 bits after a refit of the given strength."""
    moments = Moments(hessian=HESSIAN, drift=CROSS - HESSIAN, tokens=1)
    refitted = refit(WEIGHT, moments, factor(), strength=strength)
    scale = GOLDEN["scale"]
    form = integer_format(4)
    return round_columns(refitted, factor(), Grid(form=form, scale=scale, zero=0 * scale, width=16))


def error(values: torch.Tensor) -> float:
    """Return |X W^T - X~ Q^T|^2 minus |X W^T|^2, which does not depend on Q."""
    return float((values @ HESSIAN * values).sum() - 2 * (values @ CROSS * WEIGHT).sum())


def test_codes_and_output_error_equal_qronos() -> None:
    found, expected = codes(rounded(1.0)), codes(GOLDEN["rounded"])
    first = factor().order[0]
    same = found[:, first] == expected[:, first]
    # The next assertion covers most rows.
    assert same.float().mean() > 0.6
    assert (found == expected)[same].float().mean() >= 0.999
    qronos, full, gptq = (
        error(values) for values in (GOLDEN["rounded"], rounded(1.0), rounded(0.0))
    )
    assert qronos < gptq
    assert full < qronos + 0.02 * (gptq - qronos)


def test_outputs_give_the_same_weight_as_drift() -> None:
    """A refit gets the same weight from the source's outputs as from the drift of its inputs."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 40, generator=generator).bfloat16()
    source = torch.randn(4000, 40, generator=generator).bfloat16()
    quantized = source + torch.randn(4000, 40, generator=generator).bfloat16() / 8
    refitted = []
    for outputs in (0, 6):
        moments = Moments.zeros(40, drift=not outputs, outputs=outputs)
        wanted = torch.nn.functional.linear(source, weight) if outputs else source
        moments.add(quantized, wanted, weights=torch.exp2(torch.arange(4000) % 3 - 1.0))
        moments.add(quantized[:0], wanted[:0])
        whole = factorize(moments.complete().hessian, 0.1)
        assert whole is not None
        refitted.append(refit(weight.float(), moments, whole, strength=1.0))
    change = (refitted[0] - weight.float()).norm()
    assert change > 0.01 * weight.float().norm()
    assert (refitted[1] - refitted[0]).norm() < 0.01 * change


@pytest.mark.parametrize(
    ("scheme", "bits"), [("W4A16", 16), ("W8A8", 8), ("NVFP4", 4), ("MXFP4", 4)]
)
def test_strength_of_refit(scheme: str, bits: int, tmp_path: Path) -> None:
    """The strength comes from a table by the bits of the inputs, or from the rule."""
    folder = save_llama(tmp_path / "llama")

    def found(rounding: object) -> Strength:
        rule = Rule.model_validate({"match": "Linear", "scheme": scheme, "rounding": rounding})
        _, plan = plan_headers(Folder.at(folder), [rule], PlanSettings(), silent)
        (strength,) = {strength_of(group) for group in plan.groups}
        return strength

    assert found("gptq") == GPTQ
    assert found("refit") == REFIT_STRENGTHS[bits]
    assert found({"strength": 0.75}).strength == 0.75
    assert found({"method": "refit", "strength": 1, "ridge": 0.01}).ridge == 0.01


@pytest.mark.parametrize(
    "rounding", [{"strength": 1.5}, {"ridge": 0}, {"method": "gptq", "strength": 0.5}]
)
def test_invalid_strength_is_refused(rounding: object) -> None:
    with pytest.raises(ValueError, match="strength|ridge|refit"):
        Rule.model_validate({"match": "Linear", "scheme": "W4A16", "rounding": rounding})


TESTS = Path(__file__).resolve().parents[1]
SCENARIOS = TESTS.parent / "scenarios"


@pytest.mark.slow
def test_refit_reduces_divergence(tmp_path: Path) -> None:
    """The refit leaves less than a quarter of the divergence of rounding to nearest."""
    scenario = yaml.safe_load((SCENARIOS / "demo-rescue-int4.yaml").read_text())
    rung = yaml.safe_load((TESTS / "ladder" / "int4-g128-x8.yaml").read_text())
    layers, same = scenario["rules"][-1], rung["rules"][-1]
    assert {**same, "rounding": "refit"} == layers
    source, data = SCENARIOS / scenario["source"], SCENARIOS / scenario["calibration"]["data"]
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = [
        tokenizer(json.loads(line)["text"])["input_ids"]
        for line in data.read_text().splitlines()[-8:]
    ]
    left, options = [], ("--scheme", layers["scheme"], "--calibration", data, "--samples", 24)
    for rounding in ("nearest", layers["rounding"]):
        ran = vexport("quantize", source, tmp_path / rounding, *options, "--rounding", rounding)
        assert ran.code == 0, ran.stderr
        left.append(divergence(source, tmp_path / rounding, rows))
    assert 0 < left[1] < left[0] / 4
