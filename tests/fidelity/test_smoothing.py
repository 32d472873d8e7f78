"""Smoothed weights, compared with the model before smoothing. Factors that cancel are no error."""

from pathlib import Path

import pytest
import torch

from tests.checks.quant_methods import write
from tests.models import save_llama
from tests.mutations.edits import Change, Tensors, put, spoiled, tensors
from vexport.checks import check_checkpoint
from vexport.fidelity.compare import source_comparison
from vexport.records import Finding

LAYER = "model.layers.1"
# Tensors that are divided by factors (the norm, or the rows of a weight), and the layers whose
# columns are multiplied by them.
STEPS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("self_attn.v_proj", ("self_attn.o_proj",)),
    ("mlp.up_proj", ("mlp.down_proj",)),
)
PEER = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a micro Llama with as many value heads as query heads."""
    folder = tmp_path_factory.mktemp("smoothing") / "model"
    return save_llama(folder, num_hidden_layers=2, num_key_value_heads=4)


def smoothed(source: Path, folder: Path) -> Path:
    """Save a copy with weights multiplied and divided by random factors from 0.5 to 2.

    The model's output does not change.
    """

    def smooth(values: Tensors) -> None:
        generator = torch.Generator().manual_seed(0)
        for before, after in STEPS:
            old = values[f"{LAYER}.{before}.weight"]
            factors = 2 ** (2 * torch.rand(old.shape[0], generator=generator) - 1)
            divisor = factors if old.ndim == 1 else factors[:, None]
            values[f"{LAYER}.{before}.weight"] = (old / divisor).to(old.dtype)
            for name in after:
                weight = values[f"{LAYER}.{name}.weight"]
                values[f"{LAYER}.{name}.weight"] = (weight * factors).to(weight.dtype)

    return spoiled(source, folder, tensors(smooth))


def source_findings(checkpoint: Path, source: Path) -> list[Finding]:
    compare = source_comparison(source, on_layer=lambda done, total: None)
    findings = check_checkpoint(str(checkpoint), against=compare).findings
    return [each for each in findings if each.check == "source"]


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_cancelling_factors_are_info(source: Path, tmp_path: Path, method: str) -> None:
    checkpoint = write(method, smoothed(source, tmp_path / "smoothed"), tmp_path / "quantized")
    findings = source_findings(checkpoint, source)
    assert [each.where for each in findings if each.severity == "error"] == []
    (note,) = [each for each in findings if each.rule == "source/smoothed"]
    assert note.severity == "info"
    assert "and 6 more layers" in note.where


def halve_scales(rows: slice, columns: slice) -> Change:
    """Halve the scales of some groups of a layer."""

    def change(scales: torch.Tensor) -> torch.Tensor:
        scales = scales.clone()
        scales[rows, columns] /= 2
        return scales

    return put(f"{LAYER}.mlp.down_proj.scales", change)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (
            put(f"{LAYER}.input_layernorm.weight", lambda value: value * 1.5),
            "input_layernorm.weight",
        ),
        (put(f"{LAYER}.post_attention_layernorm.weight", torch.ones_like), "mlp.up_proj"),
        (halve_scales(slice(None), slice(None)), "mlp.down_proj"),
        (halve_scales(slice(0, 2), slice(None)), "mlp.down_proj"),
    ],
)
def test_other_factors_are_errors(source: Path, tmp_path: Path, change: Change, where: str) -> None:
    checkpoint = write("awq", smoothed(source, tmp_path / "smoothed"), tmp_path / "quantized")
    change(checkpoint)
    errors = [
        each.where for each in source_findings(checkpoint, source) if each.severity == "error"
    ]
    assert f"{LAYER}.{where}" in errors


def test_factors_in_autoawqs_checkpoint() -> None:
    """AutoAWQ on a CPU left factors of 0.8 to 1.2 in up_proj that down_proj does not cancel."""
    checkpoint = PEER / "producers" / "methods" / "autoawq-llama-GEMM"
    findings = source_findings(checkpoint, PEER / "peer" / "llama")
    (error,) = [each for each in findings if each.severity == "error"]
    assert (error.where, "within the layer" in error.got) == ("model.layers.0.mlp.up_proj", True)
