"""Ways to spoil checkpoints of other quantization methods, with the check and the place."""

from collections.abc import Callable, Mapping

import torch

from tests.checks.quant_methods import QUARK_FP8, awq_packed, quark_config
from tests.mutations.edits import (
    QUANTIZATION,
    Change,
    config,
    drop,
    element,
    inverse,
    put,
    rename,
    times,
    unquantized,
)
from vexport.records import Json

LAYER = "model.layers.1"
GATE = f"{LAYER}.mlp.gate_proj"
DOWN, Q, K, V = f"{LAYER}.mlp.down_proj", *(f"{LAYER}.self_attn.{each}_proj" for each in "qkv")
NAN, INFINITE = float("nan"), float("inf")
# What is done, the family that finds it, and where.
Spoiled = tuple[Change, str, str]
Edit = Callable[[torch.Tensor], torch.Tensor]


def powers(exponents: torch.Tensor) -> torch.Tensor:
    return torch.exp2(exponents.float() - 127)


def quantization(**changes: Json) -> Change:
    return config(QUANTIZATION, **changes)


def says(family: str, where: str, /, **changes: Json) -> Spoiled:
    return quantization(**changes), family, where


def lacks(leaf: str) -> Spoiled:
    return drop(f"{DOWN}.{leaf}"), "completeness", f"{DOWN}.{leaf}"


def of_form(leaf: str, edit: Edit, layer: str = DOWN) -> Spoiled:
    return put(f"{layer}.{leaf}", edit), "shapes", f"{layer}.{leaf}"


def of_value(leaf: str, edit: Edit) -> Spoiled:
    return put(f"{DOWN}.{leaf}", edit), "values", f"{DOWN}.{leaf}"


def all_zero(leaf: str) -> Spoiled:
    return put(f"{DOWN}.{leaf}", torch.zeros_like), "values", DOWN


def input_of(layer: str) -> Spoiled:
    return put(f"{layer}.input_scale", times(3)), "fusion", "input_scale"


def in_bfloat16(module: str, shape: tuple[int, int], where: str) -> Spoiled:
    return unquantized(module, *shape), "targets", where


def transposed(value: torch.Tensor) -> torch.Tensor:
    return value.T


def e5m2(value: torch.Tensor) -> torch.Tensor:
    return value.float().to(torch.float8_e5m2)


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.uint8)


def doubled(value: torch.Tensor) -> torch.Tensor:
    return value.repeat(1, 2)


def along_inputs(value: torch.Tensor) -> torch.Tensor:
    return awq_packed(torch.zeros(256, 512))


KEPT: Json = {"bits": 16}
QKV, GLOBAL = "qkv_proj", "global_quant_config"
BLOCKS: dict[str, Json] = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
SPOILED: Mapping[str, Mapping[str, Spoiled]] = {
    "gptq": {
        "other bits": says("shapes", "qweight", bits=8),
        "other groups": says("shapes", "scales", group_size=128),
        "groups of 16": says("config", "quantization_config", group_size=16),
        "columns in order of activation": says("config", "desc_act", desc_act=True),
        "zero points that vLLM refuses": says("config", "quantization_config", sym=False),
        "no number of bits": says("config", "bits", bits=None),
        "no scales": lacks("scales"),
        "no codes": lacks("qweight"),
        "a scale that is NaN": of_value("scales", element(NAN)),
        "scales that are far too large": of_value("scales", times(3000)),
        "columns in another order": of_form("g_idx", lambda value: value.flip(0)),
        "zero points that vLLM drops": of_form("qzeros", lambda value: value ^ 3),
        "codes of the inputs last": of_form("qweight", transposed),
        "codes of another dtype": of_form("qweight", torch.Tensor.float),
        "a part that is not quantized": in_bfloat16(K, (128, 256), QKV),
        "a rule that keeps what is quantized": says(
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
        "other bits": says("config", "quantization_config", bits=8),
        "other groups": says("shapes", "scales", group_size=128),
        "another layout": says("config", "version", version="gemv"),
        "no groups": says("config", "group_size", group_size="all"),
        "no zero points": lacks("qzeros"),
        "no scales": lacks("scales"),
        "an infinite scale": of_value("scales", element(INFINITE)),
        "scales that are zero": of_value("scales", torch.zeros_like),
        "packed along the inputs": of_form("qweight", along_inputs),
        "zero points the other way": of_form("qzeros", transposed),
        "a list that keeps what is quantized": says(
            "targets", DOWN, modules_to_not_convert=["layers.1.mlp.down_proj"]
        ),
        "a list that keeps a part": says(
            "targets", QKV, modules_to_not_convert=["layers.1.self_attn.k_proj"]
        ),
        "a part that is not quantized": in_bfloat16(V, (128, 256), QKV),
        "codes all zero": all_zero("qweight"),
    },
    "auto-round": {
        "other bits": says("shapes", "qweight", bits=8),
        "other groups": says("shapes", "scales", group_size=128),
        "zero points that vLLM refuses": says("config", "quantization_config", sym=False),
        "another layout": says("config", "packing_format", packing_format="auto_round:gptqmodel"),
        "the layout of AWQ": says("shapes", "qweight", packing_format="auto_round:auto_awq"),
        "another type of data": says("config", "data_type", data_type="nv_fp"),
        "no number of bits": says("config", "bits", bits=None),
        "a layer that its settings keep": says("targets", DOWN, extra_config={DOWN: KEPT}),
        "a part that its settings keep": says("targets", QKV, extra_config={K: KEPT}),
        "a pattern with other bits": says(
            "shapes", f"{DOWN}.qweight", extra_config={r"layers\.1\.mlp\.down": {"bits": 8}}
        ),
        "blocks that are not quantized": says(
            "targets", DOWN, block_name_to_quantize="model.layers.0"
        ),
        "no scales": lacks("scales"),
        "a scale that is NaN": of_value("scales", element(NAN)),
        "codes of the inputs last": of_form("qweight", transposed),
    },
    "auto-round-mxfp4": {
        "other groups": says("config", "group_size", group_size=64),
        "another layout": says("config", "packing_format", packing_format="auto_round:auto_gptq"),
        "other bits": says("completeness", f"{DOWN}.weight", bits=8),
        "zero points": says("config", "group_size", sym=False),
        "no scales": lacks("weight_scale"),
        "no codes": lacks("weight_packed"),
        "one byte a code": of_form("weight_packed", doubled, GATE),
        "scales as numbers": of_form("weight_scale", powers),
        "a scale that is NaN": of_value("weight_scale", element(255)),
        "codes all zero": all_zero("weight_packed"),
        "a layer that is not quantized": in_bfloat16(DOWN, (256, 512), DOWN),
    },
    "quark-fp8": {
        "no export": says("config", "export", export=None),
        "a cache of which nothing is said": says("config", "kv_cache_group", layer_quant_config={}),
        "another kind of weights": says(
            "config", GLOBAL, global_quant_config={"weight": {"dtype": "fp6_e3m2"}}
        ),
        "inputs that are not quantized": says(
            "config", GLOBAL, global_quant_config={"weight": QUARK_FP8, "input_tensors": None}
        ),
        "nothing that says how": says("config", GLOBAL, global_quant_config=None),
        "a layer that is excluded": says("targets", DOWN, exclude=["lm_head", DOWN]),
        "a part that is excluded": says("targets", QKV, exclude=["lm_head", K]),
        "a pattern that keeps what is quantized": says(
            "targets", DOWN, exclude=["lm_head", r"re:.*layers\.1\.mlp"]
        ),
        "no scale": lacks("weight_scale"),
        "no scale of inputs": lacks("input_scale"),
        "a scale upside down": of_value("weight_scale", inverse),
        "inputs of one layer scaled otherwise": input_of(K),
        "a scale of keys that is zero": (
            put(f"{K}.output_scale", element(0.0)),
            "kv_cache",
            "output_scale",
        ),
        "a weight in e5m2": of_form("weight", e5m2),
    },
    "quark-int4": {
        "other groups": says(
            *("shapes", "weight_scale"),
            **quark_config({"dtype": "int4", "group_size": 128, "symmetric": True}, None),
        ),
        "one scale a row": says(
            "config", GLOBAL, **quark_config({"dtype": "int4", "group_size": None}, None)
        ),
        "packed by another method": says(
            "config", GLOBAL, export={"kv_cache_group": [], "pack_method": "other"}
        ),
        "no scales": lacks("weight_scale"),
        "an infinite scale": of_value("weight_scale", element(INFINITE)),
        "packed along the inputs": of_form("weight", along_inputs),
        "codes of another dtype": of_form("weight", torch.Tensor.float),
        "a part that is not quantized": in_bfloat16(V, (128, 256), "v_proj"),
        "scales that are zero": of_value("weight_scale", torch.zeros_like),
    },
    "quark-int8": {
        "no scales": lacks("weight_scale"),
        "a weight that is cut": of_form("weight", lambda value: value[:256], GATE),
        "a negative scale": of_value("weight_scale", element(-1.0)),
    },
    "quark-mxfp4": {
        "no scales": lacks("weight_scale"),
        "a scale that is NaN": of_value("weight_scale", element(255)),
        "scales as numbers": of_form("weight_scale", powers),
        "codes all zero": all_zero("weight"),
    },
    "fp8-block": {
        "other blocks": says("shapes", "weight_scale_inv", weight_block_size=[64, 64]),
        "half a block": says("config", "weight_block_size", weight_block_size=[128]),
        "static inputs": says("config", "activation_scheme", activation_scheme="static"),
        "no word of inputs": says("config", "activation_scheme", activation_scheme="none"),
        "no scales": lacks("weight_scale_inv"),
        "scales by compressed-tensors' name": (
            rename(f"{DOWN}.weight_scale_inv", f"{DOWN}.weight_scale"),
            *("completeness", f"{DOWN}.weight_scale_inv"),
        ),
        "scales upside down": of_value("weight_scale_inv", inverse),
        "a negative scale": of_value("weight_scale_inv", element(-1.0)),
        "a weight that is NaN": of_value("weight", element(NAN)),
        "scales the other way": of_form("weight_scale_inv", transposed),
        "a weight as bytes": of_form("weight", as_bytes),
        "a layer that is not quantized": in_bfloat16(DOWN, (256, 512), DOWN),
        "a list that keeps what is quantized": says("targets", DOWN, modules_to_not_convert=[DOWN]),
        "a list that keeps a part": says("targets", QKV, modules_to_not_convert=[K]),
    },
    "fp8-static": {
        "no scale of inputs": lacks("input_scale"),
        "inputs of one layer scaled otherwise": input_of(K),
        "no scale": lacks("weight_scale"),
        "a scale upside down": of_value("weight_scale", inverse),
        "a scale that is zero": of_value("weight_scale", element(0.0)),
        "a scale for each row": of_form("weight_scale", lambda value: value.repeat(256)),
        "in blocks": says("completeness", "weight_scale_inv", **BLOCKS),
        "dynamic inputs": says("completeness", "input_scale", activation_scheme="dynamic"),
        "a weight in e5m2": of_form("weight", e5m2),
        "a scale of inputs that is NaN": of_value("input_scale", element(NAN)),
    },
    "modelopt-fp8": {
        "no scale of inputs": lacks("input_scale"),
        "another algorithm": says("config", "quant_algo", quant_algo="FP9"),
        "another algorithm's scales": says(
            "shapes", "weight_scale", quant_algo="FP8_PER_CHANNEL_PER_TOKEN"
        ),
        "a head that is not kept": says("targets", "lm_head", ignore=[]),
        "a pattern that keeps what is quantized": says(
            "targets", DOWN, ignore=["lm_head", "*layers.1.mlp*"]
        ),
        "a scale upside down": of_value("weight_scale", inverse),
        "inputs of one layer scaled otherwise": input_of(V),
        "a layer that is not quantized": in_bfloat16(DOWN, (256, 512), DOWN),
        "a weight too short": of_form("weight", lambda value: value[:200]),
        "a scale of inputs far too large": of_value("input_scale", times(1e6)),
    },
    "modelopt-nvfp4": {
        "no second scale": lacks("weight_scale_2"),
        "a second scale upside down": of_value("weight_scale_2", inverse),
        "a second scale of another layer": (
            put(f"{K}.weight_scale_2", times(2)),
            "fusion",
            "weight_scale_2",
        ),
        "a second scale that is zero": of_value("weight_scale_2", element(0.0)),
        "inputs of one layer scaled otherwise": input_of(Q),
        "no scale of inputs": lacks("input_scale"),
        "scales as bytes": of_form("weight_scale", as_bytes),
        "a scale that is NaN": of_value("weight_scale", element(NAN)),
        "groups of 32": says("config", "group_size", group_size=32),
        "no algorithm": says("config", "quant_algo", quant_algo=None),
        "a head that is not kept": says("targets", "lm_head", ignore=["other"]),
        "one byte a code": of_form("weight", doubled, GATE),
        "a scale of keys that is zero": (put(f"{K}.k_scale", element(0.0)), "kv_cache", "k_scale"),
        "weights only, without a list": says("config", "quant_algo", quant_algo="W4A8_NVFP4_FP8"),
    },
}
