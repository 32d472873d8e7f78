"""Every family that calibrates is rounded by its text: experts, latent attention, heads and the like."""

from collections.abc import Mapping
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.calibration.models import configs, expert_configs, samples, save
from vexport.calibration import calibrate
from vexport.calibration.walk import LayerWalk
from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import as_tensor
from vexport.formats.packing.base import Array
from vexport.formats.schemes import get_scheme
from vexport.layers.blocks import group_layout
from vexport.plan.build import PlanSettings
from vexport.plan.source import plan_headers
from vexport.quantize.rounding import round_weights
from vexport.quantize.stream import quantized_group
from vexport.records import CalibrationRecord, KvCache, Plan, silent
from vexport.records.calibration import GroupRounding, RoundingReport
from vexport.scenario import Rule

TEXT = samples((24,) * 8)


def plan_of(
    folder: Path, scheme: str, rounding: str, kv_cache: KvCache | None = None
) -> tuple[SourceIndex, Plan]:
    rules = [
        Rule(match=match, scheme=scheme, observer="memoryless_minmax", rounding=rounding)
        for match in (("lm_head", "Linear") if folder.name == "qwen3" else ("Linear",))
    ]
    return plan_headers(
        str(folder), rules, PlanSettings(on_unsupported_shape="keep", kv_cache=kv_cache), silent
    )


def run(index: SourceIndex, plan: Plan, out: Path) -> tuple[Mapping[str, Array], RoundingReport]:
    walk = LayerWalk(index)
    return round_weights(walk, plan, calibrate(walk, plan, TEXT), TEXT, out)


def rounded(
    folder: Path, out: Path, scheme: str, rounding: str = "gptq"
) -> tuple[Mapping[str, Array], Mapping[str, GroupRounding]]:
    """The bytes of a checkpoint's groups, and how each was rounded."""
    index, plan = plan_of(folder, scheme, rounding)
    found, report = run(index, plan, out)
    told = {group.name: group for group in report.groups}
    assert told.keys() == {group.name for group in plan.groups}
    return found, told


FAMILIES = {
    "mixtral": (False, "MXFP4", "layers.1.block_sparse_moe.experts.7.w2"),
    "qwen3_moe": (True, "NVFP4", "layers.1.mlp.experts.0.w13"),
    "llama4": (True, "MXFP4", "layers.0.feed_forward.experts.3.down_proj"),
    "deepseek_v3": (False, "W8A8", "layers.0.self_attn.fused_qkv_a_proj"),
    "qwen3_next": (False, "W8A8", "layers.0.linear_attn.in_proj_qkvz"),
    "gpt2": (False, "MXFP4A16", "transformer.h.2.mlp.c_proj"),
    "qwen3": (False, "MXFP4", "lm_head"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_groups_are_rounded_by_what_enters_them(family: str, tmp_path: Path) -> None:
    stacked, scheme, present = FAMILIES[family]
    config = {**configs(), **expert_configs()}[family]
    folder = save(config, tmp_path / family, stacked=stacked)
    stored, told = rounded(folder, tmp_path / "rounded", scheme)
    assert any(name.endswith(present) for name in told)
    reached = [group for group in told.values() if group.tokens]
    assert len(reached) >= 0.9 * len(told)
    assert {group.fallback for group in reached} == {None}
    assert {group.fallback for group in told.values() if not group.tokens} <= {
        "no token of the calibration text reaches it"
    }
    better = [group.error < group.nearest_error for group in reached]
    assert sum(better) > 0.95 * len(better)
    index, plan = plan_of(folder, scheme, "gptq")
    names = {member.name for group in plan.groups for member in group.members}
    assert {name.rpartition(".")[0] for name in stored} == names


def weights_of(
    plan: Plan, index: SourceIndex, stored: Mapping[str, Array] | None
) -> Mapping[str, torch.Tensor]:
    """The weights (out, in) by layer, as compressed-tensors dequantizes them; without bytes the nearest."""
    weights: dict[str, torch.Tensor] = {}
    nothing = CalibrationRecord(rows=(), digest="", tokens=0, ranges={})
    for group in plan.groups:
        scheme = get_scheme(group.scheme)
        with Reader() as reader:
            made = stored or quantized_group(group, index, nothing, reader, search=None)
        tensors = {spec.name: as_tensor(made[spec.name], spec) for spec in group_layout(group, index.tensors)}
        for member in group.members:
            own = {
                name.rpartition(".")[2]: value
                for name, value in tensors.items()
                if name.rpartition(".")[0] == member.name
            }
            weights[member.name] = scheme.format.dequantize(scheme.args, own).float()
    return weights


@pytest.mark.usefixtures("own_products")
def test_the_cache_is_calibrated_in_the_quantized_stream(tmp_path: Path) -> None:
    """Ranges are those of a plain model with the dequantized weights; the source's are others."""
    folder = save(configs()["llama"], tmp_path / "llama")
    index, plan = plan_of(folder, "MXFP4A16", "gptq", "fp8")
    stored, report = run(index, plan, tmp_path / "rounded")
    tensors = load_file(folder / "model.safetensors")
    for name, weight in weights_of(plan, index, stored).items():
        tensors[f"{name}.weight"] = weight.to(torch.bfloat16)
    copy = copytree(folder, tmp_path / "copy")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    quantized = calibrate(LayerWalk(read_index(copy)), plan, TEXT).kv_ranges
    assert len(quantized) == 3
    assert report.cached == quantized
    assert report.cached != calibrate(LayerWalk(index), plan, TEXT).kv_ranges
