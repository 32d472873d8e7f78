"""Columns that a refit scales in all rows are no fault. Wrong scales next to them are found."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.command import findings
from tests.models import quantize, save_llama
from tests.mutations.edits import Change, Tensors, put, spoiled, tensors

DOWN = "model.layers.1.mlp.down_proj"
UP = "model.layers.1.mlp.up_proj"
# Columns with large weights, which have half of the power of their groups.
COLUMNS = (5, 200)
SCALE = f"{DOWN}.weight_scale"
Scales = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_llama(tmp_path_factory.mktemp("columns") / "llama", num_hidden_layers=2)

    def enlarge(values: Tensors) -> None:
        values[f"{DOWN}.weight"][:, COLUMNS] *= 12

    tensors(enlarge)(folder)
    return folder


def with_columns(source: Path, name: str, scheme: str, factor: float) -> Path:
    """Quantize a source whose columns of large weights are rescaled, like by a refit."""

    def change(values: Tensors) -> None:
        values[f"{DOWN}.weight"][:, COLUMNS] *= factor

    changed = spoiled(source, source.with_name(f"changed-{name}"), tensors(change))
    return quantize(changed, source.with_name(name), scheme)


@pytest.fixture(scope="module")
def refitted(source: Path) -> Path:
    return with_columns(source, "refitted", "W8A16", 0.6)


def wrong_layers(checkpoint: Path, source: Path) -> dict[str, str]:
    found = findings(checkpoint, "--source", source)
    return {
        each["where"]: each["got"]
        for each in found
        if (each["check"], each["severity"]) == ("source", "error")
    }


@pytest.mark.parametrize("scheme", ["W8A16", "W4A16", "NVFP4A16", "FP8_DYNAMIC"])
@pytest.mark.parametrize("factor", [0.5])
def test_rescaled_columns_pass(source: Path, scheme: str, factor: float) -> None:
    checkpoint = with_columns(source, f"{scheme}-{factor}", scheme, factor)
    assert wrong_layers(checkpoint, source) == {}


def exchange_columns(scale: torch.Tensor) -> torch.Tensor:
    return scale[:, [1, 0, *range(2, scale.shape[1])]]


def enlarge_rows(scale: torch.Tensor) -> torch.Tensor:
    factors = torch.ones(len(scale), 1)
    factors[: len(scale) // 8] = 1.3
    return scale * factors


WRONG: list[tuple[str, Change]] = [
    ("blocks in reverse order", put(SCALE, lambda scale: scale.flip(1))),
    ("two blocks exchanged", put(SCALE, exchange_columns)),
    ("rows in reverse order", put(SCALE, lambda scale: scale.flip(0))),
    ("groups shifted", put(SCALE, lambda scale: scale.roll(1, dims=1))),
    ("some rows too large", put(SCALE, enlarge_rows)),
    (
        "a block of all rows too small",
        put(SCALE, lambda scale: scale * torch.tensor([1, 1, 0.7, 1])),
    ),
    (
        "blocks of all rows too large",
        put(SCALE, lambda scale: scale * torch.tensor([1, 1.25, 1, 1.25])),
    ),
]


@pytest.mark.parametrize("change", [each[1] for each in WRONG], ids=[each[0] for each in WRONG])
def test_wrong_scales_are_found(
    refitted: Path, source: Path, tmp_path: Path, change: Change
) -> None:
    assert wrong_layers(spoiled(refitted, tmp_path / "wrong", change), source).keys() == {DOWN}


def test_message_names_place_and_remedy(refitted: Path, source: Path, tmp_path: Path) -> None:
    wrong = spoiled(refitted, tmp_path / "wrong", put(SCALE, lambda scale: scale.flip(1)))
    (finding,) = [
        each for each in findings(wrong, "--source", source) if each["severity"] == "error"
    ]
    assert (finding["rule"], finding["where"]) == ("source/different-weight", DOWN)
    assert "within the layer" in finding["got"]


def test_exchanged_layers_are_found(refitted: Path, source: Path, tmp_path: Path) -> None:
    """Up and gate projections have the same shape, and no rescaled columns."""
    names = [f"model.layers.1.mlp.gate_proj.weight_{part}" for part in ("packed", "scale")]

    def exchange(values: Tensors) -> None:
        for name in names:
            other = name.replace("gate_proj", "up_proj")
            values[name], values[other] = values[other], values[name]

    wrong = spoiled(refitted, tmp_path / "wrong", tensors(exchange))
    assert UP in wrong_layers(wrong, source)
