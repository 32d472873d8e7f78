"""Output that is read back and compared with the source, for all schemes and layouts of weights."""

from pathlib import Path

import pytest
import torch

from tests.architectures.families import save_family
from tests.models import Good, problems, quantize, save_llama
from tests.mutations.edits import Tensors, spoiled, tensors
from vexport.checkpoint.index import SourceIndex, read_index
from vexport.fidelity.dequantize import changed_tensors, layer_errors
from vexport.formats import dequantize
from vexport.formats.plan import Plan
from vexport.formats.schemes import scheme_names
from vexport.names import Folder
from vexport.plan.build import PlanSettings
from vexport.plan.source import plan_source
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.scenario import Rule

# Least signal-to-noise in dB of a normal weight, rounded to nearest with scales from the range.
MINIMUM_DB = {
    **dict.fromkeys(("NVFP4", "NVFP4A16"), 19.5),
    **dict.fromkeys(("MXFP4", "MXFP4A16", "MXFP4XFP8"), 18.0),
    **dict.fromkeys(("MXFP8", "MXFP8A16", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"), 31.0),
    **dict.fromkeys(("W8A8", "INT8"), 41.0),
    **dict.fromkeys(("W4A8", "W4AFP8", "W4A16"), 18.5),
    **{"W4A16_ASYM": 19.0, "W8A16": 42.0, "W2A16": 4.5, "W3A16": 12.0},
    **{"W5A16": 25.0, "W6A16": 31.0, "W7A16": 37.0},
}


def read_back(
    source: Path, out: Path, rules: tuple[Rule, ...], settings: PlanSettings | None = None
) -> tuple[SourceIndex, SourceIndex, Plan]:
    """Return source, output and plan."""
    index, plan = plan_source(Folder.at(source), rules, settings or PlanSettings())
    assert [finding for finding in problems(out) if finding.severity == "error"] == []
    return index, read_index(out), plan


def all_linears(scheme: str) -> tuple[Rule, ...]:
    return (Rule(match="Linear", scheme=scheme),)


@pytest.mark.parametrize("scheme", scheme_names())
def test_layers_are_close_to_source(
    llama: Path, good: Good, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, back, plan = read_back(llama, good(scheme), all_linears(scheme))
    errors = layer_errors(index, back, plan)
    assert len(errors) == 21
    assert {error.name: error.snr_db for error in errors if error.snr_db < MINIMUM_DB[scheme]} == {}
    assert list(changed_tensors(index, back, plan)) == []
    monkeypatch.setattr(dequantize, "CHUNK_ELEMENTS", 1)
    assert layer_errors(index, back, plan) == errors


def test_incomplete_blocks_are_close_to_source(tmp_path: Path) -> None:
    """500 columns are no whole blocks.

    Gate and up are fused and stay unquantized, down is quantized.
    """
    source = save_llama(tmp_path / "source", intermediate_size=500, num_hidden_layers=1)
    out = quantize(source, tmp_path / "out", "FP8_BLOCK", "--on-unsupported-shape", "keep")
    keeping = PlanSettings(on_unsupported_shape="keep")
    index, back, plan = read_back(source, out, all_linears("FP8_BLOCK"), keeping)
    errors = {
        error.name.rpartition(".")[2]: error.snr_db for error in layer_errors(index, back, plan)
    }
    assert errors.keys() == {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}
    assert min(errors.values()) > MINIMUM_DB["FP8_BLOCK"]
    assert back.tensors["model.layers.0.mlp.down_proj.weight"].shape == (256, 500)
    assert back.tensors["model.layers.0.mlp.down_proj.weight_scale"].shape == (2, 4)


@pytest.mark.slow
def test_mixed_schemes_are_close_to_source(llama: Path, tmp_path: Path) -> None:
    """MLPs are FP4, attention and the output head are FP8. Each is compared in its arithmetic."""
    rules = (
        Rule(match="lm_head", scheme="FP8_DYNAMIC"),
        Rule(match=r"re:.*self_attn", scheme="FP8_DYNAMIC"),
        Rule(match="down_proj", scheme="W3A16", observer="memoryless_mse"),
        Rule(match="Linear", scheme="NVFP4A16"),
    )
    quantize_source(QuantizeJob(source=Folder.at(llama), out=tmp_path / "out", rules=rules))
    errors = layer_errors(*read_back(llama, tmp_path / "out", rules))
    assert len(errors) == 22
    assert [error for error in errors if error.snr_db < MINIMUM_DB[error.scheme]] == []
    assert {error.scheme for error in errors} == {"FP8_DYNAMIC", "NVFP4A16", "W3A16"}


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-vl-moe"])
@pytest.mark.parametrize("scheme", ["NVFP4A16", "W4A16_ASYM", "FP8_BLOCK", "MXFP8"])
def test_experts_are_close_to_source(tmp_path: Path, family: str, scheme: str) -> None:
    """Experts are in separate tensors, or stacked and transposed."""
    source = save_family(family, tmp_path / "source")
    out = quantize(source, tmp_path / "out", scheme)
    index, back, plan = read_back(source, out, all_linears(scheme))
    errors = layer_errors(index, back, plan)
    assert sum(".experts." in error.name for error in errors) > 10
    assert [error for error in errors if error.snr_db < MINIMUM_DB[scheme]] == []
    assert list(changed_tensors(index, back, plan)) == []


def test_changed_byte_is_found(llama: Path, good: Good, tmp_path: Path) -> None:
    layer = "model.layers.1.mlp.up_proj"

    def change(values: Tensors) -> None:
        values["model.norm.weight"].view(torch.uint8)[5] ^= 1
        values[f"{layer}.weight_scale"][7] += 2

    index, plan = plan_source(Folder.at(llama), all_linears("MXFP4"), PlanSettings())
    back = read_index(spoiled(good("MXFP4"), tmp_path / "out", tensors(change)))
    (finding,) = changed_tensors(index, back, plan)
    assert (finding.where, finding.rule) == ("model.norm.weight", "roundtrip/changed-tensor")
    lowest = min(layer_errors(index, back, plan), key=lambda error: error.snr_db)
    assert lowest.name == layer
    assert lowest.snr_db < MINIMUM_DB["MXFP4"]
