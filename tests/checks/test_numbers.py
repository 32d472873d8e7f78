"""Numbers and settings that cannot be intended.

Each rule has a case that it reports and a case that it accepts.
"""

import math
from pathlib import Path

import pytest
import torch

from tests.command import findings
from tests.models import Good, errors, quantize
from tests.mutations.edits import (
    Change,
    Tensors,
    add,
    all_of,
    fill_with,
    inverse,
    put,
    spoiled,
    tensors,
)
from tests.texts import assert_contains
from vexport.checks import SourceComparison, check_checkpoint
from vexport.formats.arguments import parse_args
from vexport.records import Json

LAYER = "model.layers.1"
Q = f"{LAYER}.self_attn.q_proj"


def error_places(good: Path, folder: Path, change: Change) -> list[str]:
    """Return the places of the errors."""
    return [error.where for error in errors(spoiled(good, folder, change))]


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
def test_arguments_as_in_compressed_tensors(arguments: Json, refused: bool) -> None:
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
def test_zero_unquantized_weight_is_error(good: Good, tmp_path: Path, name: str) -> None:
    assert error_places(good("W8A8"), tmp_path / "zero", put(name, fill_with(0.0))) == [name]


@pytest.mark.parametrize(
    ("leaf", "shape", "value", "wrong"),
    [
        ("input_max", (), math.inf, False),  # bounds of Gemma 4 that clip nothing
        ("output_min", (1,), -math.inf, False),
        ("input_max", (), math.nan, True),
        ("local_causal_mask", (4, 4), -math.inf, False),
        ("A_log", (4,), math.inf, True),
        ("weight", (4, 4), -math.inf, True),
    ],
)
def test_infinite_bounds_and_weights(
    good: Good, tmp_path: Path, leaf: str, shape: tuple[int, ...], value: float, wrong: bool
) -> None:
    """Values that the source has as well are a warning."""
    name = f"model.vision_tower.encoder.proj.{leaf}"
    change = add(name, torch.full(shape, value, dtype=torch.bfloat16))
    folder = spoiled(good("W8A8"), tmp_path / "changed", change)
    alone = check_checkpoint(str(folder)).findings
    assert [each.where for each in alone if each.check == "values"] == [name] * wrong
    other = spoiled(
        good("W8A8"), tmp_path / "other", add(name, torch.zeros(shape, dtype=torch.bfloat16))
    )
    for source, severity in ((folder, "warning"), (other, "error")):
        against = SourceComparison(root=source, run=lambda view: iter(()))
        report = check_checkpoint(str(folder), against=against)
        found = [finding for finding in report.findings if finding.check == "values"]
        assert [(each.where, each.severity) for each in found] == [(name, severity)] * wrong
        is_shared = source == folder
        assert all(("same problem" in each.got) == is_shared for each in found)


def test_fault_of_source_is_warning(llama: Path, tmp_path: Path) -> None:
    """A row of the embeddings that is infinite in the source is infinite in the checkpoint."""
    name = "model.embed_tokens.weight"

    def overflow(values: Tensors) -> None:
        values[name][7] = math.inf

    source = spoiled(llama, tmp_path / "source", tensors(overflow))
    out = quantize(source, tmp_path / "out", "FP8_DYNAMIC")
    (alone,) = (each for each in findings(out) if each["check"] == "values")
    assert (alone["where"], alone["severity"]) == (name, "error")
    (compared,) = (each for each in findings(out, "--source", source) if each["where"] == name)
    assert compared["severity"] == "warning"
    assert_contains(compared["got"], "infinite", "the unquantized model has the same problem")


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC"])
def test_transposed_weight_is_found(good: Good, tmp_path: Path, scheme: str) -> None:
    """After a transposition, the largest codes of a row no longer fill its range."""
    assert error_places(
        good(scheme), tmp_path / "turned", put(f"{Q}.weight", lambda value: value.T)
    ) == [Q]


def test_zero_rows(good: Good, tmp_path: Path) -> None:
    """A row of zeros is an error if its scale belongs to other values."""

    def pruned(values: Tensors) -> None:
        values[f"{Q}.weight"][::2] = 0
        values[f"{Q}.weight_scale"][::2] = torch.finfo(torch.float32).eps

    def lost(values: Tensors) -> None:
        values[f"{Q}.weight"][::2] = 0

    assert error_places(good("W8A8"), tmp_path / "lost", tensors(lost)) == [Q]
    assert error_places(good("W8A8"), tmp_path / "pruned", tensors(pruned)) == []


def test_input_scale_beyond_norm_is_found(good: Good, tmp_path: Path) -> None:
    """A norm limits the input of the next layer, and so its input scale."""
    names = [f"{LAYER}.self_attn.{leaf}_proj.input_scale" for leaf in "qkv"]
    upside_down = all_of(*(put(name, inverse) for name in names))
    assert error_places(good("FP8"), tmp_path / "inverse", upside_down) == names


def test_stored_fused_layers(good: Good, tmp_path: Path) -> None:
    def fused(values: Tensors) -> None:
        place = f"{LAYER}.self_attn"
        for leaf in ("weight", "weight_scale"):
            parts = [values.pop(f"{place}.{part}_proj.{leaf}") for part in "qkv"]
            values[f"{place}.qkv_proj.{leaf}"] = torch.cat(parts)

    def cut(values: Tensors) -> None:
        fused(values)
        name = f"{LAYER}.self_attn.qkv_proj.weight_scale"
        values[name] = values[name][:-1].clone()

    assert error_places(good("W8A8"), tmp_path / "fused", tensors(fused)) == []
    assert error_places(good("W8A8"), tmp_path / "cut", tensors(cut)) == [
        f"{LAYER}.self_attn.qkv_proj.weight_scale"
    ]


def test_negative_scale_hides_no_error(good: Good, tmp_path: Path) -> None:
    """A negative scale that cancels out is a warning.

    The layer's other tensors are still checked.
    """
    change = all_of(
        put(f"{Q}.input_scale", lambda scale: -scale),
        put(f"{Q}.weight_scale", lambda scale: scale * 1e6),
    )
    report = check_checkpoint(str(spoiled(good("FP8"), tmp_path / "bad", change)))
    severities = {
        finding.where: finding.severity for finding in report.findings if finding.check == "values"
    }
    assert severities == {f"{Q}.input_scale": "warning", f"{Q}.weight_scale": "error"}
