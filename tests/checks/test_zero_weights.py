"""Scales of weights that are zero mean nothing; a zero scale of other weights is an error."""

from pathlib import Path

import pytest
import torch

from tests.models import Good, errors
from tests.mutations.edits import Tensors, spoiled, tensors

LAYER = "model.layers.1"
DOWN = f"{LAYER}.mlp.down_proj"
# The stored code of zero, by scheme: packed integers have it in the middle of their range.
CODES = {
    "W8A8": ("weight", 0),
    "FP8_DYNAMIC": ("weight", 0),
    "FP8_BLOCK": ("weight", 0),
    "NVFP4A16": ("weight_packed", 0),
    "W4A16": ("weight_packed", -0x77777778),
}


def emptied(scheme: str, scale: float, *, rows: slice = slice(None), codes: bool = True):  # type: ignore[no-untyped-def]
    def change(values: Tensors) -> None:
        parameter, zero = CODES[scheme]
        if codes:
            weight = values[f"{DOWN}.{parameter}"]
            zeros = torch.full_like(weight.view(torch.uint8) if weight.is_floating_point() else weight, zero)
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
def test_empty_layers(good: Good, tmp_path: Path, scheme: str, scale: float) -> None:
    assert errors(spoiled(good(scheme), tmp_path / "zero", emptied(scheme, scale))) == []


@pytest.mark.parametrize("scheme", [name for name in CODES if name != "FP8_BLOCK"])
def test_empty_rows(good: Good, tmp_path: Path, scheme: str) -> None:
    change = emptied(scheme, 0.0, rows=slice(0, None, 2))
    assert errors(spoiled(good(scheme), tmp_path / "zero", change)) == []


@pytest.mark.parametrize("scheme", CODES)
def test_zero_scales_of_other_weights(good: Good, tmp_path: Path, scheme: str) -> None:
    change = emptied(scheme, 0.0, rows=slice(0, 1), codes=False)
    found = errors(spoiled(good(scheme), tmp_path / "zero", change))
    assert f"{DOWN}.weight_scale" in [each.where for each in found]
