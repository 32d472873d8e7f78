"""Numbers and settings that cannot be meant: each rule where it speaks and where it does not."""

import math
from pathlib import Path

import pytest
import torch

from tests.models import Good, errors
from tests.mutations.edits import (
    Change,
    Tensors,
    add,
    all_of,
    every,
    inverse,
    put,
    spoiled,
    tensors,
)
from vexport.checks import Against, check_checkpoint
from vexport.formats.arguments import parse_args
from vexport.records import Json

LAYER = "model.layers.1"
Q = f"{LAYER}.self_attn.q_proj"


def found(good: Path, folder: Path, change: Change) -> list[str]:
    """The places of the errors."""
    return [one.where for one in errors(spoiled(good, folder, change))]


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ({"dynamic": "local", "strategy": "tensor_group", "group_size": 16, "num_bits": 4}, False),
        ({"dynamic": "false"}, True),
        ({"group_size": "128"}, True),
        ({"num_bits": "8"}, False),
        ({"num_bits": 0}, True),
        ({"actorder": "static"}, False),
        ({"actorder": False}, False),
        ({"actorder": "by-hand"}, True),
    ],
)
def test_arguments_are_refused_as_compressed_tensors_does(arguments: Json, refused: bool) -> None:
    from compressed_tensors.quantization import QuantizationArgs

    assert isinstance(parse_args(arguments), str) is refused
    try:
        QuantizationArgs.model_validate(arguments)
        accepted = arguments != {"num_bits": 0}
    except (ValueError, TypeError):
        accepted = False
    assert accepted is not refused


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"]
)
def test_what_is_not_quantized_is_not_all_zero(good: Good, tmp_path: Path, name: str) -> None:
    assert found(good("W8A8"), tmp_path / "zero", put(name, every(0.0))) == [name]


@pytest.mark.parametrize(
    ("leaf", "shape", "value", "wrong"),
    [
        ("input_max", (), math.inf, False),  # Gemma 4's, between which nothing is clipped
        ("output_min", (1,), -math.inf, False),
        ("input_max", (), math.nan, True),
        ("local_causal_mask", (4, 4), -math.inf, False),
        ("A_log", (4,), math.inf, True),
        ("weight", (4, 4), -math.inf, True),
    ],
)
def test_bounds_may_be_infinite_and_weights_not(
    good: Good, tmp_path: Path, leaf: str, shape: tuple[int, ...], value: float, wrong: bool
) -> None:
    """An error of the numbers only where the source has others."""
    name = f"model.vision_tower.encoder.proj.{leaf}"
    change = add(name, torch.full(shape, value, dtype=torch.bfloat16))
    folder = spoiled(good("W8A8"), tmp_path / "changed", change)
    findings = check_checkpoint(str(folder)).findings
    assert [one.where for one in findings if one.check == "values"] == [name] * wrong
    other = spoiled(
        good("W8A8"), tmp_path / "other", add(name, torch.zeros(shape, dtype=torch.bfloat16))
    )
    for source, found in ((folder, 0), (other, int(wrong))):
        against = Against(root=source, run=lambda view: iter(()))
        findings = check_checkpoint(str(folder), against=against).findings
        assert [one.where for one in findings if one.check == "values"] == [name] * found


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC"])
def test_a_transposed_weight_leaves_ranges_unfilled(
    good: Good, tmp_path: Path, scheme: str
) -> None:
    assert found(good(scheme), tmp_path / "turned", put(f"{Q}.weight", lambda value: value.T)) == [
        Q
    ]


def test_rows_that_are_all_zero_fill_no_range(good: Good, tmp_path: Path) -> None:
    def pruned(values: Tensors) -> None:
        values[f"{Q}.weight"][::2] = 0
        values[f"{Q}.weight_scale"][::2] = torch.finfo(torch.float32).eps

    def lost(values: Tensors) -> None:
        values[f"{Q}.weight"][::2] = 0

    assert found(good("W8A8"), tmp_path / "lost", tensors(lost)) == [Q]
    assert found(good("W8A8"), tmp_path / "pruned", tensors(pruned)) == []


def test_an_input_is_no_larger_than_its_norm_lets_through(good: Good, tmp_path: Path) -> None:
    names = [f"{LAYER}.self_attn.{leaf}_proj.input_scale" for leaf in "qkv"]
    upside_down = all_of(*(put(name, inverse) for name in names))
    assert found(good("FP8"), tmp_path / "inverse", upside_down) == names


def test_layers_may_be_stored_as_vllm_fuses_them(good: Good, tmp_path: Path) -> None:
    def fused(values: Tensors) -> None:
        place = f"{LAYER}.self_attn"
        for leaf in ("weight", "weight_scale"):
            parts = [values.pop(f"{place}.{part}_proj.{leaf}") for part in "qkv"]
            values[f"{place}.qkv_proj.{leaf}"] = torch.cat(parts)

    def cut(values: Tensors) -> None:
        fused(values)
        name = f"{LAYER}.self_attn.qkv_proj.weight_scale"
        values[name] = values[name][:-1].clone()

    assert found(good("W8A8"), tmp_path / "fused", tensors(fused)) == []
    assert found(good("W8A8"), tmp_path / "cut", tensors(cut)) == [
        f"{LAYER}.self_attn.qkv_proj.weight_scale"
    ]


def test_a_sign_that_cancels_hides_nothing(good: Good, tmp_path: Path) -> None:
    """The layer's other numbers are looked at beside the warning."""
    change = all_of(
        put(f"{Q}.input_scale", lambda scale: -scale),
        put(f"{Q}.weight_scale", lambda scale: scale * 1e6),
    )
    report = check_checkpoint(str(spoiled(good("FP8"), tmp_path / "bad", change)))
    severities = {
        finding.where: finding.severity for finding in report.findings if finding.check == "values"
    }
    assert severities == {f"{Q}.input_scale": "warning", f"{Q}.weight_scale": "error"}
