"""Zero weights, whose scales have no effect. A zero scale of other weights is an error."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.architectures.families import save_family
from tests.checks.quant_methods import CHECKPOINTS, write, write_experts
from tests.models import Good, errors
from tests.mutations.edits import Change, Tensors, put, spoiled, tensors

LAYER = "model.layers.1"
DOWN = f"{LAYER}.mlp.down_proj"
# The stored code of zero by scheme. For packed integers, it is the middle of their range.
CODES = {
    "W8A8": ("weight", 0),
    "FP8_DYNAMIC": ("weight", 0),
    "FP8_BLOCK": ("weight", 0),
    "NVFP4A16": ("weight_packed", 0),
    "W4A16": ("weight_packed", -0x77777778),
}


def zero_layer(scheme: str, scale: float, *, rows: slice = slice(None), codes: bool = True):  # type: ignore[no-untyped-def]
    """Set a layer's scales in `rows` to `scale`, and with `codes` the weights to zero."""

    def change(values: Tensors) -> None:
        parameter, zero = CODES[scheme]
        if codes:
            weight = values[f"{DOWN}.{parameter}"]
            zeros = torch.full_like(
                weight.view(torch.uint8) if weight.is_floating_point() else weight, zero
            )
            weight[rows] = zeros.view(weight.dtype)[rows]
        if scheme == "FP8_BLOCK":
            values[f"{DOWN}.weight_scale"][:] = scale
        else:
            values[f"{DOWN}.weight_scale"][rows] = torch.tensor(scale).to(
                values[f"{DOWN}.weight_scale"].dtype
            )

    return tensors(change)


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.0**-20])
@pytest.mark.parametrize("scheme", CODES)
def test_zero_layers(good: Good, tmp_path: Path, scheme: str, scale: float) -> None:
    assert errors(spoiled(good(scheme), tmp_path / "zero", zero_layer(scheme, scale))) == []


@pytest.mark.parametrize("scheme", [name for name in CODES if name != "FP8_BLOCK"])
def test_rows_of_zeros(good: Good, tmp_path: Path, scheme: str) -> None:
    change = zero_layer(scheme, 0.0, rows=slice(0, None, 2))
    assert errors(spoiled(good(scheme), tmp_path / "zero", change)) == []


@pytest.mark.parametrize("scheme", CODES)
def test_zero_scales_of_other_weights(good: Good, tmp_path: Path, scheme: str) -> None:
    change = zero_layer(scheme, 0.0, rows=slice(0, 1), codes=False)
    found = errors(spoiled(good(scheme), tmp_path / "zero", change))
    assert f"{DOWN}.weight_scale" in [each.where for each in found]


# Weights of zeros, by the end of their names: whole layers, or the last rows of layers.
ZEROS: Mapping[str, tuple[tuple[str, ...], slice]] = {
    "layer": (("1.mlp.down_proj.weight",), slice(None)),
    "attention": (tuple(f"1.self_attn.{part}_proj.weight" for part in "qkvo"), slice(None)),
    "rows": (("1.mlp.down_proj.weight", "1.self_attn.v_proj.weight"), slice(64, None)),
}


def set_zero(names: tuple[str, ...], rows: slice) -> Change:
    @tensors
    def change(values: Tensors) -> None:
        for name in values:
            if name.endswith(names):
                values[name][rows] = 0

    return change


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("method", CHECKPOINTS)
def test_zero_weights_of_other_methods(
    llama: Path, tmp_path: Path, method: str, zeros: str
) -> None:
    """Zeros have a range of zero, and so a scale of zero."""
    source = spoiled(llama, tmp_path / "source", set_zero(*ZEROS[zeros]))
    assert errors(write(method, source, tmp_path / "quantized")) == []


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8-block", "modelopt-nvfp4"])
def test_zero_expert(tmp_path: Path, method: str) -> None:
    model = save_family(
        "qwen3-moe", tmp_path / "model", num_key_value_heads=4, tie_word_embeddings=False
    )
    parts = tuple(f"1.mlp.experts.2.{part}_proj.weight" for part in ("gate", "up", "down"))
    source = spoiled(model, tmp_path / "source", set_zero(parts, slice(None)))
    assert errors(write_experts(method, source, tmp_path / "quantized")) == []


def test_zero_second_scale_of_other_weights(llama: Path, tmp_path: Path) -> None:
    """ModelOpt's second scale may be zero only if the weights are zero."""
    written = write("modelopt-nvfp4", llama, tmp_path / "modelopt")
    name = f"{DOWN}.weight_scale_2"
    found = errors(spoiled(written, tmp_path / "zero", put(name, torch.zeros_like)))
    assert any(name in each.where for each in found)
