"""`check --source` on weights rounded by their inputs: sound weights pass, damaged weights fail."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command import findings
from tests.models import Good, dequantized, quantize, save_llama, write_calibration
from tests.mutations.edits import Tensors, put, spoiled, tensors

LAYER = "model.layers.{}.{}"
ZERO = -0x77777778  # eight codes of 8, which stands for 0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("rounded") / "llama")


@pytest.fixture(scope="module")
def text(source: Path) -> Path:
    """Write a text of few words.

    Its inputs are correlated, so that a refit changes weights much. Only one strength is tried.
    """
    return write_calibration(source.with_name("text.jsonl"), rows=7, vocabulary=40)


@pytest.fixture(scope="module")
def refitted(source: Path, text: Path) -> Good:
    def make(scheme: str) -> Path:
        out = source.with_name(scheme)
        if not out.exists():
            quantize(source, out, scheme, "--rounding", "refit", "--calibration", text)
        return out

    return make


def differing_layers(checkpoint: Path, source: Path) -> dict[str, str]:
    """Return the finding for each layer that differs from the source."""
    found = [
        finding
        for finding in findings(checkpoint, "--source", source)
        if finding["check"] == "source"
    ]
    assert {finding["severity"] for finding in found} <= {"info", "error"}
    return {finding["where"]: finding["got"] for finding in found if finding["severity"] == "error"}


Edit = Callable[[Tensors, str], None]


def change_part(part: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def apply(values: Tensors, layer: str) -> None:
        name = f"{layer}.weight_{part}"
        values[name] = edit(values[name].clone()).contiguous()

    return apply


def first_rows(
    edit: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: torch.cat([edit(value[:32]), value[32:]])


def from_layer(number: int) -> Edit:
    def apply(values: Tensors, layer: str) -> None:
        projection = layer.split(".", 3)[3]
        for part in ("packed", "scale"):
            other = values[f"model.layers.{number}.{projection}.weight_{part}"]
            values[f"{layer}.weight_{part}"] = other.clone()

    return apply


# Damages by layer.
SPOILED: Mapping[str, Edit] = {
    LAYER.format(0, "self_attn.q_proj"): change_part(
        "packed", first_rows(lambda rows: rows.flip(0))
    ),
    LAYER.format(0, "self_attn.o_proj"): change_part("scale", lambda scale: scale * 1.25),
    LAYER.format(0, "mlp.gate_proj"): change_part("scale", lambda scale: scale * 0.5),
    LAYER.format(0, "mlp.down_proj"): change_part("packed", lambda words: words.roll(16, dims=1)),
    LAYER.format(1, "self_attn.v_proj"): from_layer(2),
    LAYER.format(1, "mlp.up_proj"): change_part(
        "packed", first_rows(lambda rows: rows.fill_(ZERO))
    ),
    LAYER.format(1, "mlp.down_proj"): change_part("packed", lambda words: ~words),
    LAYER.format(1, "self_attn.k_proj"): change_part("scale", first_rows(lambda rows: rows * 2)),
    LAYER.format(2, "mlp.gate_proj"): change_part("packed", lambda words: words.flip(1)),
    LAYER.format(2, "self_attn.o_proj"): change_part(
        "scale", lambda scale: scale * torch.tensor([[1.4, 0.6]])
    ),
    LAYER.format(2, "mlp.down_proj"): change_part("packed", first_rows(lambda rows: ~rows)),
}


def test_damaged_layers_are_found(refitted: Good, source: Path, tmp_path: Path) -> None:
    def spoil(values: Tensors) -> None:
        for layer, edit in SPOILED.items():
            edit(values, layer)

    wrong = spoiled(refitted("W4A16"), tmp_path / "wrong", tensors(spoil))
    assert differing_layers(wrong, source).keys() == SPOILED.keys()


MASSIVE_TOKEN, MASSIVE_COLUMN, FAR_ROW = 7, 5, 9
HARD_LAYER = LAYER.format(0, "mlp.down_proj")


@pytest.fixture(scope="module")
def outlier_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Save a model with a massive activation in one column at the start of each row, and its text.

    GPTQ changes the row with a large weight in this column to -8 dB, as in layers 11 and 28 of
    SmolLM2-135M.
    """
    folder = tmp_path_factory.mktemp("hard")
    model = save_llama(folder / "llama", num_hidden_layers=1)

    @tensors
    def massive(values: Tensors) -> None:
        table = values["model.embed_tokens.weight"]
        table[:, 0] = 0
        table[MASSIVE_TOKEN] *= 0.1
        table[MASSIVE_TOKEN, 0] = 8
        for projection in ("gate", "up"):
            row = values[LAYER.format(0, f"mlp.{projection}_proj.weight")][MASSIVE_COLUMN]
            row.zero_()
            row[0] = 2
        values[f"{HARD_LAYER}.weight"][FAR_ROW, MASSIVE_COLUMN] = 1

    massive(model)
    ids = torch.randint(8, 64, (8, 23), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [json.dumps({"input_ids": [MASSIVE_TOKEN, *row]}) for row in ids]
    (folder / "text.jsonl").write_text("\n".join(rows))
    return model, folder / "text.jsonl"


def test_row_far_from_source_by_gptq_passes(
    outlier_model: tuple[Path, Path], tmp_path: Path
) -> None:
    source, text = outlier_model
    options = ("--rounding", "gptq", "--observer", "memoryless_minmax", "--calibration", text)
    made = quantize(source, tmp_path / "gptq", "W4A16", *options)
    exact = load_file(source / "model.safetensors")[f"{HARD_LAYER}.weight"][FAR_ROW].float()
    error = dequantized(made, HARD_LAYER)[FAR_ROW].float() - exact
    assert error.square().sum() > 4 * exact.square().sum()
    assert differing_layers(made, source) == {}

    def of_another_row(words: torch.Tensor) -> torch.Tensor:
        words[100] = words[101].flip(0)
        return words

    wrong = spoiled(made, tmp_path / "wrong", put(f"{HARD_LAYER}.weight_packed", of_another_row))
    found = differing_layers(wrong, source)
    assert list(found) == [HARD_LAYER]
    assert "row 100" in found[HARD_LAYER]
