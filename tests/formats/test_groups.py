"""Schemes with other groups of columns than their presets answer all that the presets answer."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig

from tests.command import vexport
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_tensor
from vexport.errors import InputError
from vexport.formats import INT8, PACKED, vllm_format, written_format
from vexport.formats.config import quantization_config
from vexport.formats.dequantize import unpack_int32
from vexport.formats.schemes import get_scheme, regrouped, scheme_name
from vexport.records import FusionGroup, LinearPlan, Plan

LAYER = LinearPlan(name="layer", weight="layer.weight", out_features=64, in_features=256)


@pytest.mark.parametrize(
    ("text", "name", "groups"),
    [
        ("w4a16-g64", "W4A16_G64", 4),
        ("W4A16_G32", "W4A16_G32", 8),
        ("W4A16 channel", "W4A16_CHANNEL", 1),
        ("w4a16_asym_g64", "W4A16_ASYM_G64", 4),
        ("W3A16_G256", "W3A16_G256", 1),
    ],
)
def test_names_and_layouts(text: str, name: str, groups: int) -> None:
    assert scheme_name(text) == name
    scheme = get_scheme(name)
    shapes = {spec.name.removeprefix("layer."): spec.shape for spec in scheme.layout(LAYER, "BF16")}
    assert shapes["weight_scale"] == (64, groups)
    assert scheme.format is PACKED
    assert vllm_format(scheme.args, PACKED.name) is PACKED
    size = scheme.args.weights.group
    narrow = LinearPlan(name="layer", weight="layer.weight", out_features=64, in_features=136)
    reason = scheme.unsupported_shape((narrow,))
    assert reason == (f"in_features 136 is not a multiple of group size {size}" if size else None)


def test_a_scale_a_row_is_stored_as_its_inputs_ask() -> None:
    assert regrouped(get_scheme("W8A8"), None).format is INT8
    assert regrouped(get_scheme("W8A8"), 64).format is PACKED
    assert written_format(get_scheme("W8A8").args) is INT8


@pytest.mark.parametrize(
    "name", ["NVFP4_G32", "FP8_DYNAMIC_G64", "MXFP4_CHANNEL", "W4A16_G0", "W4A16_G64_G32", "W4AFP8_G64"]
)
def test_floats_have_the_groups_of_their_format(name: str) -> None:
    with pytest.raises(InputError, match="scheme"):
        get_scheme(name)


@pytest.mark.parametrize("name", ["W4A16_G64", "W4A16_CHANNEL", "W4A16_ASYM_G32", "W3A16_G64"])
def test_what_is_written_is_checked_and_read_back(llama: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    assert vexport("quantize", llama, out, "--scheme", name.lower(), "--quiet").code == 0
    ran = vexport("check", out, "--source", llama, "--tp", "1,2", "--sm", "90", "--format", "json")
    (report,) = json.loads(ran.stdout)
    assert report["ok"], report["findings"]
    args = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    scheme, index = get_scheme(name), read_index(out)
    assert args["weights"]["group_size"] == scheme.args.weights.group_size
    layer = "model.layers.0.mlp.down_proj"
    with Reader() as reader:
        packed, scale = (
            read_tensor(reader, index.tensors[f"{layer}.{leaf}"])
            for leaf in ("weight_packed", "weight_scale")
        )
        codes = unpack_int32(packed, scheme.args.weights.num_bits, scheme.args.weights.group or 256)
    assert int(codes.min()) < int(codes.max()) < 1 << scheme.args.weights.num_bits
    assert scale.shape[1] == (1 if scheme.args.weights.group is None else 512 // scheme.args.weights.group)


@pytest.mark.parametrize(
    ("name", "capability", "package"),
    [
        ("W4A16_G64", 75, ""),
        ("W4A16_G256", 75, ""),
        ("W4A16_G16", 75, "humming-kernels"),
        ("W8A16_CHANNEL", 75, ""),
        ("W8A16_G256", 75, "humming-kernels"),
        ("W4AFP8", 90, ""),
    ],
)
def test_gpus_depend_on_the_groups(name: str, capability: int, package: str) -> None:
    """MARLIN_SUPPORTED_GROUP_SIZES, TRITON_W4A16_SUPPORTED_GROUP_SIZES and `can_implement` of CUTLASS."""
    scheme = get_scheme(name)
    support = scheme.format.gpu_support(scheme.args)
    assert support.package == package
    assert [sm for sm in (75, 80, 89, 90, 100) if not support.refuses(sm)][:1] == [capability]


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
