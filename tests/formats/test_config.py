"""vLLM and compressed-tensors read of the config what the plan says."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig

from vexport.formats.config import quantization_config
from vexport.records import FusionGroup, LinearPlan, Plan

ATTENTION = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj")
FUSED = {"qkv_proj": list(ATTENTION), "gate_up_proj": list(MLP)}


def group(prefix: str, fused: str, members: tuple[str, ...], scheme: str) -> FusionGroup:
    return FusionGroup(
        name=f"{prefix}{fused}",
        scheme=scheme,
        observer="memoryless_minmax",
        members=tuple(
            LinearPlan(name=prefix + name, weight=f"{prefix}{name}.weight", out_features=256, in_features=256)
            for name in members
        ),
    )


def mixed() -> Plan:
    """FP8 attention, NVFP4 MLP in layer 0, NVFP4 experts in layer 1, an FP8 head; o_proj stays."""
    layers = [f"model.layers.{number}." for number in range(2)]
    experts = [f"model.layers.1.mlp.experts.{number}." for number in range(4)]
    groups = [group(f"{layer}self_attn.", "qkv_proj", ATTENTION, "FP8_DYNAMIC") for layer in layers]
    groups += [group("model.layers.0.mlp.", "gate_up_proj", MLP, "NVFP4A16")]
    groups += [group(expert, "w13", (*MLP, "down_proj"), "NVFP4A16") for expert in experts]
    groups += [group("", "lm_head", ("lm_head",), "FP8_DYNAMIC")]
    return Plan(
        source="",
        architecture="Qwen3MoeForCausalLM",
        groups=tuple(groups),
        kept=(),
        kept_linears=(),
        ignore=tuple(f"{layer}self_attn.o_proj" for layer in layers),
        source_bytes=0,
        output_bytes=0,
        parameters=0,
    )


def test_each_scheme_has_its_group_and_format() -> None:
    config = QuantizationConfig.model_validate(quantization_config(mixed()))
    formats = {group.format for group in config.config_groups.values()}
    assert formats == {"float-quantized", "nvfp4-pack-quantized"}
    assert config.format == "mixed-precision"
    assert config.ignore == ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]


def test_one_scheme_targets_the_class_and_a_head_by_pattern() -> None:
    plan = mixed()
    groups = [group for group in plan.groups if group.scheme == "FP8_DYNAMIC"]
    raw = quantization_config(
        Plan(
            source="",
            architecture="Qwen3MoeForCausalLM",
            groups=tuple(groups),
            kept=(),
            kept_linears=(),
            source_bytes=0,
            output_bytes=0,
            parameters=0,
        )
    )
    config = QuantizationConfig.model_validate(raw)
    assert config.config_groups["group_0"].targets == ["Linear", "re:.*lm_head$"]
    assert config.format == "float-quantized"


@pytest.mark.vllm
@pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
def test_vllm_resolves_the_targets(prefix: str) -> None:
    """Also where vLLM nests the model in another, as its mapper translates the names."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.models.utils import WeightsMapper

    config = CompressedTensorsConfig.from_config(dict(quantization_config(mixed())))
    config.packed_modules_mapping = FUSED
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": prefix}))

    def format_of(name: str) -> str | None:
        found = config.get_scheme_dict(torch.nn.Linear(1, 1), name)
        return None if found is None else str(found["format"])

    assert format_of(f"{prefix}layers.0.self_attn.qkv_proj") == "float-quantized"
    assert format_of(f"{prefix}layers.1.self_attn.o_proj") is None
    assert format_of(f"{prefix}layers.0.mlp.gate_up_proj") == "nvfp4-pack-quantized"
    assert format_of(f"{prefix}layers.1.mlp.experts.0.down_proj") == "nvfp4-pack-quantized"
    assert format_of(f"{prefix}layers.11.mlp.experts.0.down_proj") is None
    assert format_of(prefix.replace("model.", "") + "lm_head") == "float-quantized"
