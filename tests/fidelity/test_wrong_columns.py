"""`check --source` finds columns of a weight that rounding does not explain, in every scheme."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.command import findings, vexport
from tests.models import Good, quantize, save_llama, write_calibration
from tests.mutations.edits import Tensors, all_of, put, spoiled, tensors
from vexport.fidelity.columns import ColumnSums

LAYER = "model.layers.{}.{}"
Damage = Callable[[torch.Tensor], None]


def turn_columns(*columns: int) -> Damage:
    def apply(weight: torch.Tensor) -> None:
        weight[:, columns] *= -1

    return apply


def turn_in_some_rows(weight: torch.Tensor) -> None:
    weight[: len(weight) // 2, 11] *= -1


def enlarge_column(weight: torch.Tensor) -> None:
    weight[:, 40] *= 2


def erase_columns(weight: torch.Tensor) -> None:
    weight[:, 7::100] = 0


def reverse_block(weight: torch.Tensor) -> None:
    weight[:, 32:48] = weight[:, 32:48].flip(1)


def shift_block(weight: torch.Tensor) -> None:
    weight[:, 100:120] = weight[:, 99:119].clone()


def copy_column(weight: torch.Tensor) -> None:
    weight[:, 3] = weight[:, 90]


def add_noise(weight: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(len(weight), generator=generator) * weight[:, 60].float().std()
    weight[:, 60] += 1.5 * noise.to(weight.dtype)


DAMAGES: Mapping[str, Damage] = {
    LAYER.format(0, "self_attn.k_proj"): turn_columns(200),
    LAYER.format(0, "self_attn.o_proj"): turn_in_some_rows,
    LAYER.format(0, "mlp.up_proj"): reverse_block,
    LAYER.format(1, "self_attn.q_proj"): enlarge_column,
    LAYER.format(1, "self_attn.v_proj"): shift_block,
    LAYER.format(1, "mlp.gate_proj"): turn_columns(0, 1, 255),
    LAYER.format(1, "mlp.down_proj"): erase_columns,
    LAYER.format(2, "self_attn.v_proj"): copy_column,
    LAYER.format(2, "mlp.down_proj"): add_noise,
}
SCHEMES = ("FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W4A16", "W4A16_ASYM", "NVFP4A16", "MXFP4A16")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("wrong-columns") / "llama")


@pytest.fixture(scope="module")
def damaged_source(source: Path) -> Path:
    """Save the source with wrong columns. Its exports stand for exports with wrong columns."""

    def change(values: Tensors) -> None:
        for layer, damage in DAMAGES.items():
            damage(values[f"{layer}.weight"])

    return spoiled(source, source.with_name("damaged"), tensors(change))


@pytest.fixture(scope="module")
def damaged(damaged_source: Path) -> Good:
    def make(scheme: str) -> Path:
        out = damaged_source.with_name(f"damaged-{scheme}")
        return out if out.exists() else quantize(damaged_source, out, scheme)

    return make


def wrong_layers(checkpoint: Path, source: Path) -> dict[str, str]:
    found = findings(checkpoint, "--source", source)
    return {
        each["where"]: each["got"]
        for each in found
        if (each["check"], each["severity"]) == ("source", "error")
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_wrong_columns_are_found(damaged: Good, source: Path, scheme: str) -> None:
    found = wrong_layers(damaged(scheme), source)
    assert found.keys() == DAMAGES.keys()
    assert all("column" in got for got in found.values())


def test_messages_name_columns_and_causes(damaged: Good, source: Path) -> None:
    found = wrong_layers(damaged("W8A8"), source)
    turned = found[LAYER.format(1, "mlp.gate_proj")]
    assert "3 of 256 columns (first column 0, rows 0 to 255) unlike the source's" in turned
    assert "projection -1.00" in turned
    erased = found[LAYER.format(1, "mlp.down_proj")]
    assert "6 of 512 columns (first column 7) zero" in erased
    assert "GPTQ zeroed inputs that are always zero" in erased


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W8A16"])
def test_scaled_columns_are_warnings(source: Path, tmp_path: Path, scheme: str) -> None:
    """A refit scales columns, but not as much as to be this far above rounding."""
    layer = LAYER.format(1, "self_attn.o_proj")

    def scale_columns(weight: torch.Tensor) -> torch.Tensor:
        weight[:, 9] *= 1.4
        weight[:, 130] *= 0.55
        return weight

    changed = spoiled(source, tmp_path / "changed", put(f"{layer}.weight", scale_columns))
    found = findings(quantize(changed, tmp_path / "out", scheme), "--source", source)
    (warning,) = (each for each in found if each["where"] == layer)
    assert (warning["severity"], warning["claim"]) == ("warning", "values")
    assert "2 of 256 columns (first column 9) scaled (projection 1.40" in warning["got"]


@pytest.mark.parametrize("rounding", ["gptq", "refit"])
def test_wrong_columns_are_found_after_gptq(
    source: Path, damaged_source: Path, tmp_path: Path, rounding: str
) -> None:
    """Noise as large as the column is found after rounding to nearest only: GPTQ makes it, too."""
    text = write_calibration(tmp_path / "text.jsonl", rows=24)
    options = ("--rounding", rounding, "--calibration", text)
    sound = quantize(source, tmp_path / "sound", "W4A16", *options)
    wrong = quantize(damaged_source, tmp_path / "wrong", "W4A16", *options)
    for checkpoint in (sound, wrong):
        (checkpoint / "vexport.json").unlink()
    assert wrong_layers(sound, source) == {}
    expected = {layer for layer, damage in DAMAGES.items() if damage is not add_noise}
    assert wrong_layers(wrong, source).keys() - {LAYER.format(2, "mlp.down_proj")} == expected


def test_column_of_stacked_expert_is_found() -> None:
    """A column of one expert is compared, not the sum over all experts."""
    generator = torch.Generator().manual_seed(0)
    pieces = tuple(torch.randn(64, 128, generator=generator) for _ in range(8))
    stored = torch.cat(pieces)
    stored[3 * 64 : 4 * 64, 17] *= -1
    sums = ColumnSums([64] * 8, 128)
    source, rows = torch.cat(pieces), slice(0, 512)
    noise = torch.full_like(source, 1e-3)
    sums.weigh(rows, (stored - source).square().sum(dim=1), noise.sum(dim=1))
    for part, values in (
        (sums.source, source.square()),
        (sums.error, (stored - source).square() + noise),
        (sums.rounding, noise),
        (sums.product, source * stored),
    ):
        sums.add(part, values, rows)
    ((fault,), _) = sums.faults(sums.zeros)
    assert "1 of 128 columns (first column 17, rows 192 to 255)" in fault


def test_columns_that_rounding_removes_pass(source: Path, tmp_path: Path) -> None:
    """Three bits with a large column in the group set the other columns of the group to zero."""
    weight = LAYER.format(1, "self_attn.o_proj") + ".weight"

    def enlarge(value: torch.Tensor) -> torch.Tensor:
        value[:, 5] *= 100
        return value

    coarse = spoiled(source, tmp_path / "coarse", put(weight, enlarge))
    assert wrong_layers(quantize(coarse, tmp_path / "out", "W3A16"), coarse) == {}


def test_harmless_scales_pass(source: Path, tmp_path: Path) -> None:
    """A row that is 1.3 times as large, or a layer that is 1.03 times as large, changes little."""

    def enlarge_row(scale: torch.Tensor) -> torch.Tensor:
        scale[17] *= 1.3
        return scale

    scale = LAYER.format(2, "{}.weight_scale")
    change = all_of(
        put(scale.format("mlp.up_proj"), enlarge_row),
        put(scale.format("self_attn.q_proj"), lambda value: value * 1.03),
    )
    made = quantize(source, tmp_path / "good", "W8A8")
    assert wrong_layers(spoiled(made, tmp_path / "changed", change), source) == {}


def test_repair_refuses_wrong_columns(damaged: Good, source: Path, tmp_path: Path) -> None:
    """What `check --source` calls an error is never copied to a repaired checkpoint."""
    ran = vexport("repair", damaged("FP8_DYNAMIC"), tmp_path / "out", "--source", source)
    assert ran.code == 1
    assert not (tmp_path / "out").exists()
    assert "columns" in ran.stdout + ran.stderr
