"""vLLM's fused layers with parts that are stored in one tensor, missing, or in several schemes."""

import json
import re
from pathlib import Path

import pytest

from tests.architectures.families import save_family
from tests.command import findings, vexport
from tests.models import quantize
from tests.mutations.edits import QUANTIZATION, config, drop_if, spoiled
from tests.texts import assert_contains
from vexport.architectures import get_architecture
from vexport.architectures.config import part_sizes
from vexport.architectures.ignore import parent_of_layers
from vexport.architectures.stored import joined_name, split_name
from vexport.checkpoint.index import read_index
from vexport.engine.dry.load import DryLoad
from vexport.names import Folder
from vexport.plan.build import PlanSettings, build_plan
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.records import Json
from vexport.scenario import Rule

IN_PROJ = "backbone.layers.0.mixer.in_proj"


def errors(checkpoint: Path, *options: object) -> list[str]:
    found = [
        finding for finding in findings(checkpoint, *options) if finding["severity"] == "error"
    ]
    return [f"{finding['where']}: {finding['got']}" for finding in found]


def without_experts(folder: Path) -> Path:
    """Write a hybrid model without experts.

    Its in_proj has gate and inputs (256 each), B and C (128 each) and 8 time steps.
    """
    pattern = "M-*-"
    return save_family(
        "nemotron-h", folder, ssm_state_size=64, n_groups=2, hybrid_override_pattern=pattern
    )


def test_mamba_parts_need_whole_blocks(tmp_path: Path) -> None:
    out = quantize(without_experts(tmp_path / "model"), tmp_path / "out", "FP8_BLOCK")
    assert errors(out) == []
    (error,) = [error for error in errors(out, "--tp", 2) if "in_proj" in error]
    assert_contains(error, "backbone.layers.*.mixer.in_proj", "1 layer", "tp 2")
    assert_contains(error, "out_features 64", "block size 128", "2 ranks")
    config((), mamba_head_dim=40, ssm_state_size=32)(out)
    assert_contains(errors(out)[0], f"{IN_PROJ}:", "out_features 320", "block size 128")


def test_mamba_groups_on_several_ranks(tmp_path: Path) -> None:
    """One group is repeated on two ranks, by a loader that does not support packed weights.

    Several groups are never split.
    """
    model = read_index(save_family("granite-hybrid", tmp_path / "model"))
    for scheme, is_refused in (("W4A16", True), ("NVFP4A16", True), ("FP8_DYNAMIC", False)):
        plan = build_plan(model, [Rule(match="Linear", scheme=scheme)], PlanSettings(ranks=(1, 2)))
        places = [refusal.where for refusal in plan.refusals]
        assert places == (["model.layers.0.mamba.in_proj"] if is_refused else [])
        assert all("weight_packed" in refusal.got for refusal in plan.refusals)
    uneven = read_index(save_family("granite-hybrid", tmp_path / "uneven", mamba_n_groups=4))
    plan = build_plan(
        uneven, [Rule(match="Linear", scheme="FP8_DYNAMIC")], PlanSettings(ranks=(8,))
    )
    assert any(re.search(r"\b4 groups\b.*\b8 ranks\b", refusal.got) for refusal in plan.refusals)


def test_part_sizes_follow_config() -> None:
    falcon = get_architecture("FalconH1ForCausalLM")
    sizes = {"mamba_expand": 2, "hidden_size": 256, "mamba_n_groups": 2}
    sizes |= {"mamba_d_state": 64, "mamba_n_heads": 8}
    assert part_sizes("in_proj", 1288, falcon, sizes) == (512, 512, 128, 128, 8)
    assert part_sizes("in_proj", 776, falcon, {**sizes, "mamba_d_ssm": 256}) == (
        256,
        256,
        128,
        128,
        8,
    )
    assert part_sizes("in_proj", 1000, falcon, sizes) == ()
    assert part_sizes("gate_up_proj", 1024, falcon, {}) == (512, 512)


def test_shared_keys_and_values_are_complete(tmp_path: Path) -> None:
    out = quantize(save_family("gemma4", tmp_path / "model"), tmp_path / "out", "W4A16")
    assert errors(out) == []
    drop_if(lambda name: "layers.0.self_attn.v_proj" in name)(out)
    assert any("layers.0.self_attn.v_proj" in error for error in errors(out))


@pytest.mark.vllm
def test_shared_keys_and_values_in_ignore_and_targets(tmp_path: Path) -> None:
    model = save_family("gemma4", tmp_path / "model")
    kept = quantize(
        model, tmp_path / "kept", "W4A16", "--ignore", r"re:.*layers\.1\.self_attn\.[qk]_proj"
    )
    ignore = json.loads((kept / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.1.self_attn.v_proj" in ignore
    recipe = tmp_path / "recipe.yaml"
    schemes = {"FP8_DYNAMIC": ["re:.*layers.1.self_attn.*"], "W4A16": ["Linear"]}
    recipe.write_text(
        json.dumps({"QuantizationModifier": {"scheme": schemes, "ignore": ["lm_head"]}})
    )
    mixed = tmp_path / "mixed"
    assert vexport("quantize", model, mixed, "--recipe", recipe, "--quiet").code == 0
    entries: list[Json] = [name for name in ignore if "v_proj" not in name]
    broken = spoiled(kept, tmp_path / "broken", config(QUANTIZATION, ignore=entries))
    reports = DryLoad(checkpoints=[kept, mixed, broken], tp=(1, 2)).reports()
    assert [cell.status for report in reports for cell in report.cells] == ["loads"] * 4 + [
        "refused"
    ] * 2
    assert [bool(errors(out)) for out in (kept, mixed, broken)] == [False, False, True]


# vLLM's layers by family, and their schemes with the rules below.
VLLM_LAYERS = {
    "qwen2-moe": {
        "model.layers.*.self_attn.qkv_proj": "W8A8Fp8",
        "model.layers.*.mlp.shared_expert.gate_up_proj": "W8A8Int8",
        "model.layers.*.mlp.shared_expert.down_proj": "W8A8Int8",
        "model.layers.*.mlp.experts.routed_experts": "WNA16",
    },
    "qwen3.5-moe": {
        "language_model.model.layers.*.linear_attn.in_proj_qkvz": "W8A8Fp8",
        "language_model.model.layers.*.mlp.shared_expert.gate_up_proj": "W8A8Int8",
        "language_model.model.layers.*.mlp.experts.routed_experts": "WNA16",
    },
}
RULES = (
    Rule(match="re:.*shared_expert[.].*", scheme="W8A8"),
    Rule(match="re:.*experts[.].*", scheme="W4A16"),
    Rule(match="Linear", scheme="FP8_DYNAMIC"),
)


@pytest.mark.vllm
def test_mixed_schemes_in_vllm(tmp_path: Path) -> None:
    """Qwen2-MoE's class lists no parts of gate_up_proj, so that gate_up_proj itself is a target."""
    for family in VLLM_LAYERS:
        source = Folder.at(save_family(family, tmp_path / family))
        quantize_source(QuantizeJob(source=source, out=tmp_path / f"{family}-out", rules=RULES))
    for report in DryLoad(
        checkpoints=[tmp_path / f"{family}-out" for family in VLLM_LAYERS], sm=(90,)
    ).reports():
        family = Path(report.checkpoint).name.removesuffix("-out")
        assert [cell.status for cell in report.cells] == ["loads"], report.findings
        built = {row.name: row.scheme for row in report.rows}
        assert {name: built.get(name) for name in VLLM_LAYERS[family]} == VLLM_LAYERS[family]


@pytest.mark.parametrize(
    ("module", "parent"),
    [("layers.0.mlp", ""), ("model.layers.0.mlp", "model."), ("transformer.h.1.c", "transformer.")],
)
def test_parent_of_decoder_layers(module: str, parent: str) -> None:
    assert parent_of_layers(module) == parent


@pytest.mark.parametrize(
    "name", ["image_newline", "model.norm.weight", "model.layers.0.mlp.experts.gate_up_proj_blocks"]
)
def test_name_is_split_and_joined(name: str) -> None:
    """A parameter of the whole model has no module."""
    assert joined_name(*split_name(name)) == name
