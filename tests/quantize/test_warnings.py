"""Warnings about a quantized checkpoint: missing calibration, and unquantized layers."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.architectures.families import save_family
from tests.reports import sample
from tests.texts import assert_contains
from vexport import api
from vexport.plan.rules import DEFAULT_TOKENS, enough_tokens
from vexport.plan.shapes import KEPT
from vexport.quantize.warnings import (
    MAX_NAMED,
    fallback_findings,
    fallback_warnings,
    little_quantized_warnings,
    little_text_warnings,
    unknown_expert_warnings,
    unsupported_warnings,
)
from vexport.records import CalibrationRecord, Finding
from vexport.records.calibration import GroupRounding, LayerRounding, RoundingReport
from vexport.scenario import Calibration

QKV = GroupRounding(name="model.layers.0.self_attn.qkv_proj", rounding="refit", columns=256)
FALLEN_BACK = GroupRounding(
    name="model.layers.0.mlp.down_proj", fallback="H is not positive definite"
)


def rounded(*groups: GroupRounding) -> RoundingReport:
    return RoundingReport(layers=(LayerRounding(groups=groups, state_error=0.0),))


def test_fallen_back_groups_are_named() -> None:
    rounding = rounded(QKV, FALLEN_BACK)
    assert FALLEN_BACK.fallback
    (line,) = fallback_warnings(rounding)
    assert_contains(line, FALLEN_BACK.name, "nearest", FALLEN_BACK.fallback)
    (finding,) = fallback_findings(rounding)
    assert (finding.check, finding.severity, finding.where) == (
        "rounding",
        "warning",
        FALLEN_BACK.name,
    )
    assert FALLEN_BACK.fallback in finding.got
    many = rounded(*(replace(FALLEN_BACK, name=f"down{number}") for number in range(MAX_NAMED + 2)))
    (line,) = fallback_warnings(many)
    assert_contains(line, "down3 and 2 more", "nearest")
    assert len([*fallback_findings(many)]) == MAX_NAMED + 2


def test_kept_layers_and_few_quantized_weights() -> None:
    def note(where: str, fix: str) -> Finding:
        got = "576 is not a multiple of 128"
        return Finding(check="shape", severity="info", where=where, expected="", got=got, fix=fix)

    notes = (note("down", KEPT), note("up", KEPT), note("gate", "stored in groups of 64"))
    plan = replace(sample.made_of(sample.report()).plan, notes=notes)
    kept, grouped = unsupported_warnings(plan)
    assert_contains(kept, "down and 1 more", "unquantized", "576")
    assert_contains(grouped, "gate", "groups of 64", "576")
    layers = len(plan.kept_linears)
    (few,) = little_quantized_warnings(plan, layers - 1, plan.parameters // 4)
    assert "only 25% of the weights" in few
    assert not [*little_quantized_warnings(plan, layers - 1, plan.parameters)]
    assert not [*little_quantized_warnings(plan, layers, plan.parameters // 4)]


def test_unquantized_experts_are_named(tmp_path: Path) -> None:
    source = save_family("gpt-oss", tmp_path / "model")
    (line,) = unknown_expert_warnings(api.plan(source, scheme="FP8_DYNAMIC"))
    assert_contains(line, "model.layers.0.mlp.experts.down_proj and 7 more", "stay unquantized")


def test_too_little_text() -> None:
    down = replace(QKV, name="model.layers.0.mlp.down_proj", columns=1536)
    layers = [
        LayerRounding(
            groups=tuple(
                replace(group, name=group.name.replace(".0.", f".{number}."))
                for group in (QKV, down)
            ),
            state_error=0.0,
        )
        for number in range(3)
    ]
    rounding = RoundingReport(layers=tuple(layers))
    text = CalibrationRecord(rows=(1,), digest="", tokens=8192, ranges={})
    (line,) = little_text_warnings(text, rounding)
    assert_contains(line, "8,192 tokens", "model.layers.*.mlp.down_proj", "1,536 columns")
    assert_contains(line, "--samples", "--seq-len")
    assert "qkv_proj" not in line
    assert not [*little_text_warnings(replace(text, tokens=65_536), rounding)]
    assert not [*little_text_warnings(text, RoundingReport(layers=()))]
    assert not [*little_text_warnings(None, None)]


@pytest.mark.parametrize(
    ("columns", "enough"),
    [
        (1_536, 9_216),
        (4_096, 24_576),
        (14_336, 65_536),  # the default amount of text, for an 8B model
        (28_672, 65_536),
        (53_248, 106_496),
    ],
)
def test_enough_tokens(columns: int, enough: int) -> None:
    assert enough_tokens(columns) == enough


def test_default_amount_of_text() -> None:
    calibration = Calibration(data="text.jsonl")
    assert calibration.samples * calibration.seq_len == DEFAULT_TOKENS
