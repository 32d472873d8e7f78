"""Damaged checkpoints of other quantization methods, with the check and place that report them."""

from collections.abc import Callable, Mapping

import torch

from tests.checks.quant_methods import QUARK_FP8, pack_awq, quark_config
from tests.mutations.edits import (
    QUANTIZATION,
    Change,
    config,
    drop,
    inverse,
    multiply_by,
    put,
    rename,
    set_first,
    unquantize,
)
from vexport.records import Json

LAYER = "model.layers.1"
GATE = f"{LAYER}.mlp.gate_proj"
DOWN, Q, K, V = f"{LAYER}.mlp.down_proj", *(f"{LAYER}.self_attn.{each}_proj" for each in "qkv")
NAN, INFINITE = float("nan"), float("inf")
# The change, the check that finds it, and the place of the finding.
Spoiled = tuple[Change, str, str]
Edit = Callable[[torch.Tensor], torch.Tensor]


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    return torch.exp2(exponents.float() - 127)


def quantization(**changes: Json) -> Change:
    return config(QUANTIZATION, **changes)


def changed_config(family: str, where: str, /, **changes: Json) -> Spoiled:
    return quantization(**changes), family, where


def missing(leaf: str) -> Spoiled:
    return drop(f"{DOWN}.{leaf}"), "completeness", f"{DOWN}.{leaf}"


def wrong_shape(leaf: str, edit: Edit, layer: str = DOWN) -> Spoiled:
    return put(f"{layer}.{leaf}", edit), "shapes", f"{layer}.{leaf}"


def wrong_value(leaf: str, edit: Edit) -> Spoiled:
    return put(f"{DOWN}.{leaf}", edit), "values", f"{DOWN}.{leaf}"


def all_zero(leaf: str) -> Spoiled:
    return put(f"{DOWN}.{leaf}", torch.zeros_like), "values", DOWN


def larger_input_scale(layer: str) -> Spoiled:
    return put(f"{layer}.input_scale", multiply_by(3)), "fusion", "input_scale"


def in_bfloat16(module: str, shape: tuple[int, int], where: str) -> Spoiled:
    return unquantize(module, *shape), "targets", where


def transposed(value: torch.Tensor) -> torch.Tensor:
    return value.T


def e5m2(value: torch.Tensor) -> torch.Tensor:
    return value.float().to(torch.float8_e5m2)


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.uint8)


def repeated_columns(value: torch.Tensor) -> torch.Tensor:
    return value.repeat(1, 2)


def packed_along_inputs(value: torch.Tensor) -> torch.Tensor:
    return pack_awq(torch.zeros(256, 512))


SIXTEEN_BITS: Json = {"bits": 16}
QKV, GLOBAL = "qkv_proj", "global_quant_config"
BLOCKS: dict[str, Json] = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
SPOILED: Mapping[str, Mapping[str, Spoiled]] = {
    "gptq": {
        "other bits": changed_config("shapes", "qweight", bits=8),
        "other groups": changed_config("shapes", "scales", group_size=128),
        "groups of 16": changed_config("config", "quantization_config", group_size=16),
        "columns in order of activation": changed_config("config", "desc_act", desc_act=True),
        "zero points that vLLM refuses": changed_config("config", "quantization_config", sym=False),
        "no number of bits": changed_config("config", "bits", bits=None),
        "no scales": missing("scales"),
        "no codes": missing("qweight"),
        "a scale that is NaN": wrong_value("scales", set_first(NAN)),
        "scales that are far too large": wrong_value("scales", multiply_by(3000)),
        "columns in another order": wrong_shape("g_idx", lambda value: value.flip(0)),
        "zero points that vLLM drops": wrong_shape("qzeros", lambda value: value ^ 3),
        "transposed codes": wrong_shape("qweight", transposed),
        "codes of another dtype": wrong_shape("qweight", torch.Tensor.float),
        "a fused member that is not quantized": in_bfloat16(K, (128, 256), QKV),
        "a rule that keeps what is quantized": changed_config(
            "targets", DOWN, dynamic={"-:.*layers.1.mlp.down": {}}
        ),
        "a layer's norm gone": (
            drop(f"{LAYER}.input_layernorm.weight"),
            "completeness",
            "input_layernorm",
        ),
        "codes all zero": all_zero("qweight"),
    },
    "awq": {
        "other bits": changed_config("config", "quantization_config", bits=8),
        "other groups": changed_config("shapes", "scales", group_size=128),
        "another layout": changed_config("config", "version", version="gemv"),
        "no groups": changed_config("config", "group_size", group_size="all"),
        "no zero points": missing("qzeros"),
        "no scales": missing("scales"),
        "an infinite scale": wrong_value("scales", set_first(INFINITE)),
        "scales that are zero": wrong_value("scales", torch.zeros_like),
        "packed along the inputs": wrong_shape("qweight", packed_along_inputs),
        "transposed zero points": wrong_shape("qzeros", transposed),
        "a list that keeps what is quantized": changed_config(
            "targets", DOWN, modules_to_not_convert=["layers.1.mlp.down_proj"]
        ),
        "a list that keeps a fused member": changed_config(
            "targets", QKV, modules_to_not_convert=["layers.1.self_attn.k_proj"]
        ),
        "a fused member that is not quantized": in_bfloat16(V, (128, 256), QKV),
        "codes all zero": all_zero("qweight"),
    },
    "auto-round": {
        "other bits": changed_config("shapes", "qweight", bits=8),
        "other groups": changed_config("shapes", "scales", group_size=128),
        "zero points that vLLM refuses": changed_config("config", "quantization_config", sym=False),
        "another layout": changed_config(
            "config", "packing_format", packing_format="auto_round:gptqmodel"
        ),
        "the layout of AWQ": changed_config(
            "shapes", "qweight", packing_format="auto_round:auto_awq"
        ),
        "another type of data": changed_config("config", "data_type", data_type="nv_fp"),
        "no number of bits": changed_config("config", "bits", bits=None),
        "a layer that its settings keep": changed_config(
            "targets", DOWN, extra_config={DOWN: SIXTEEN_BITS}
        ),
        "a fused member that its settings keep": changed_config(
            "targets", QKV, extra_config={K: SIXTEEN_BITS}
        ),
        "a pattern with other bits": changed_config(
            "shapes", f"{DOWN}.qweight", extra_config={r"layers\.1\.mlp\.down": {"bits": 8}}
        ),
        "blocks that are not quantized": changed_config(
            "targets", DOWN, block_name_to_quantize="model.layers.0"
        ),
        "no scales": missing("scales"),
        "a scale that is NaN": wrong_value("scales", set_first(NAN)),
        "transposed codes": wrong_shape("qweight", transposed),
    },
    "auto-round-mxfp4": {
        "other groups": changed_config("config", "group_size", group_size=64),
        "another layout": changed_config(
            "config", "packing_format", packing_format="auto_round:auto_gptq"
        ),
        "other bits": changed_config("completeness", f"{DOWN}.weight", bits=8),
        "zero points": changed_config("config", "group_size", sym=False),
        "no scales": missing("weight_scale"),
        "no codes": missing("weight_packed"),
        "one byte a code": wrong_shape("weight_packed", repeated_columns, GATE),
        "scales decoded to float32": wrong_shape("weight_scale", powers_of_two),
        "a scale that is NaN": wrong_value("weight_scale", set_first(255)),
        "codes all zero": all_zero("weight_packed"),
        "a layer that is not quantized": in_bfloat16(DOWN, (256, 512), DOWN),
    },
    "quark-fp8": {
        "no export": changed_config("config", "export", export=None),
        "a KV cache without settings": changed_config(
            "config", "kv_cache_group", layer_quant_config={}
        ),
        "another kind of weights": changed_config(
            "config", GLOBAL, global_quant_config={"weight": {"dtype": "fp6_e3m2"}}
        ),
        "inputs that are not quantized": changed_config(
            "config", GLOBAL, global_quant_config={"weight": QUARK_FP8, "input_tensors": None}
        ),
        "no global settings": changed_config("config", GLOBAL, global_quant_config=None),
        "a layer that is excluded": changed_config("targets", DOWN, exclude=["lm_head", DOWN]),
        "a fused member that is excluded": changed_config("targets", QKV, exclude=["lm_head", K]),
        "a pattern that keeps what is quantized": changed_config(
            "targets", DOWN, exclude=["lm_head", r"re:.*layers\.1\.mlp"]
        ),
        "no scale": missing("weight_scale"),
        "no scale of inputs": missing("input_scale"),
        "a scale replaced by its reciprocal": wrong_value("weight_scale", inverse),
        "inputs of one layer scaled otherwise": larger_input_scale(K),
        "a scale of keys that is zero": (
            put(f"{K}.output_scale", set_first(0.0)),
            "kv_cache",
            "output_scale",
        ),
        "a weight in e5m2": wrong_shape("weight", e5m2),
    },
    "quark-int4": {
        "other groups": changed_config(
            *("shapes", "weight_scale"),
            **quark_config({"dtype": "int4", "group_size": 128, "symmetric": True}, None),
        ),
        "one scale a row": changed_config(
            "config", GLOBAL, **quark_config({"dtype": "int4", "group_size": None}, None)
        ),
        "packed by another method": changed_config(
            "config", GLOBAL, export={"kv_cache_group": [], "pack_method": "other"}
        ),
        "no scales": missing("weight_scale"),
        "an infinite scale": wrong_value("weight_scale", set_first(INFINITE)),
        "packed along the inputs": wrong_shape("weight", packed_along_inputs),
        "codes of another dtype": wrong_shape("weight", torch.Tensor.float),
        "a fused member that is not quantized": in_bfloat16(V, (128, 256), "v_proj"),
        "scales that are zero": wrong_value("weight_scale", torch.zeros_like),
    },
    "quark-int8": {
        "no scales": missing("weight_scale"),
        "a weight that is cut": wrong_shape("weight", lambda value: value[:256], GATE),
        "a negative scale": wrong_value("weight_scale", set_first(-1.0)),
    },
    "quark-mxfp4": {
        "no scales": missing("weight_scale"),
        "a scale that is NaN": wrong_value("weight_scale", set_first(255)),
        "scales decoded to float32": wrong_shape("weight_scale", powers_of_two),
        "codes all zero": all_zero("weight"),
    },
    "fp8-block": {
        "other blocks": changed_config("shapes", "weight_scale_inv", weight_block_size=[64, 64]),
        "half a block": changed_config("config", "weight_block_size", weight_block_size=[128]),
        "static inputs": changed_config("config", "activation_scheme", activation_scheme="static"),
        "no activation scheme": changed_config(
            "config", "activation_scheme", activation_scheme="none"
        ),
        "no scales": missing("weight_scale_inv"),
        "scales by compressed-tensors' name": (
            rename(f"{DOWN}.weight_scale_inv", f"{DOWN}.weight_scale"),
            *("completeness", f"{DOWN}.weight_scale_inv"),
        ),
        "scales replaced by their reciprocals": wrong_value("weight_scale_inv", inverse),
        "a negative scale": wrong_value("weight_scale_inv", set_first(-1.0)),
        "a weight that is NaN": wrong_value("weight", set_first(NAN)),
        "transposed scales": wrong_shape("weight_scale_inv", transposed),
        "a weight as bytes": wrong_shape("weight", as_bytes),
        "a layer that is not quantized": in_bfloat16(DOWN, (256, 512), DOWN),
        "a list that keeps what is quantized": changed_config(
            "targets", DOWN, modules_to_not_convert=[DOWN]
        ),
        "a list that keeps a fused member": changed_config(
            "targets", QKV, modules_to_not_convert=[K]
        ),
    },
    "fp8-static": {
        "no scale of inputs": missing("input_scale"),
        "inputs of one layer scaled otherwise": larger_input_scale(K),
        "no scale": missing("weight_scale"),
        "a scale replaced by its reciprocal": wrong_value("weight_scale", inverse),
        "a scale that is zero": wrong_value("weight_scale", set_first(0.0)),
        "a scale for each row": wrong_shape("weight_scale", lambda value: value.repeat(256)),
        "in blocks": changed_config("completeness", "weight_scale_inv", **BLOCKS),
        "dynamic inputs": changed_config(
            "completeness", "input_scale", activation_scheme="dynamic"
        ),
        "a weight in e5m2": wrong_shape("weight", e5m2),
        "a scale of inputs that is NaN": wrong_value("input_scale", set_first(NAN)),
    },
    "modelopt-fp8": {
        "no scale of inputs": missing("input_scale"),
        "another algorithm": changed_config("config", "quant_algo", quant_algo="FP9"),
        "another algorithm's scales": changed_config(
            "shapes", "weight_scale", quant_algo="FP8_PER_CHANNEL_PER_TOKEN"
        ),
        "a head that is not kept": changed_config("targets", "lm_head", ignore=[]),
        "a pattern that keeps what is quantized": changed_config(
            "targets", DOWN, ignore=["lm_head", "*layers.1.mlp*"]
        ),
        "a scale replaced by its reciprocal": wrong_value("weight_scale", inverse),
        "inputs of one layer scaled otherwise": larger_input_scale(V),
        "a layer that is not quantized": in_bfloat16(DOWN, (256, 512), DOWN),
        "a weight too short": wrong_shape("weight", lambda value: value[:200]),
        "a scale of inputs far too large": wrong_value("input_scale", multiply_by(1e6)),
    },
    "modelopt-nvfp4": {
        "no second scale": missing("weight_scale_2"),
        "a second scale replaced by its reciprocal": wrong_value("weight_scale_2", inverse),
        "a second scale that is doubled": (
            put(f"{K}.weight_scale_2", multiply_by(2)),
            "fusion",
            "weight_scale_2",
        ),
        "a second scale that is zero": wrong_value("weight_scale_2", set_first(0.0)),
        "inputs of one layer scaled otherwise": larger_input_scale(Q),
        "no scale of inputs": missing("input_scale"),
        "scales as bytes": wrong_shape("weight_scale", as_bytes),
        "a scale that is NaN": wrong_value("weight_scale", set_first(NAN)),
        "groups of 32": changed_config("config", "group_size", group_size=32),
        "no algorithm": changed_config("config", "quant_algo", quant_algo=None),
        "a head that is not kept": changed_config("targets", "lm_head", ignore=["other"]),
        "one byte a code": wrong_shape("weight", repeated_columns, GATE),
        "a scale of keys that is zero": (
            put(f"{K}.k_scale", set_first(0.0)),
            "kv_cache",
            "k_scale",
        ),
        "an unknown algorithm": changed_config("config", "quant_algo", quant_algo="W4A8_NVFP4_FP8"),
    },
}
