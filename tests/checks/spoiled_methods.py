"""Ways to spoil checkpoints of other quantization methods, each with the check that finds it and where."""

from collections.abc import Mapping

import torch

from tests.checks.quant_methods import QUARK_FP8, awq_packed, quark_config
from tests.mutations.edits import QUANTIZATION, Change, Tensors, config, drop, put, rename, tensors
from vexport.records import Json

LAYER = "model.layers.1"
GATE = f"{LAYER}.mlp.gate_proj"
DOWN, Q, K, V = f"{LAYER}.mlp.down_proj", *(f"{LAYER}.self_attn.{each}_proj" for each in "qkv")


def scaled(name: str, factor: float) -> Change:
    return put(name, lambda value: (value.float() * factor).to(value.dtype))


def filled(name: str, number: float) -> Change:
    """The first element of a tensor, whatever its dtype."""

    def change(value: torch.Tensor) -> torch.Tensor:
        flat = value.float().reshape(-1).clone()
        flat[0] = number
        return flat.reshape(value.shape).to(value.dtype)

    return put(name, change)


def inverted(name: str) -> Change:
    return put(name, lambda value: 1 / value)


def cast(name: str, dtype: torch.dtype) -> Change:
    return put(name, lambda value: value.to(dtype))


def powers(exponents: torch.Tensor) -> torch.Tensor:
    return torch.exp2(exponents.float() - 127)


def transposed(name: str) -> Change:
    return put(name, lambda value: value.T)


def quantization(**changes: Json) -> Change:
    return config(QUANTIZATION, **changes)


def unquantized(module: str, shape: tuple[int, int]) -> Change:
    """A layer in bfloat16 in the place of a quantized one."""

    def change(values: Tensors) -> None:
        for name in [name for name in values if name.startswith(f"{module}.")]:
            del values[name]
        values[f"{module}.weight"] = torch.full(shape, 0.01, dtype=torch.bfloat16)

    return tensors(change)


# What is done, the family that finds it, and where.
SPOILED: Mapping[str, Mapping[str, tuple[Change, str, str]]] = {
    "gptq": {
        "other bits": (quantization(bits=8), "shapes", "qweight"),
        "other groups": (quantization(group_size=128), "shapes", "scales"),
        "groups of 16": (quantization(group_size=16), "config", "quantization_config"),
        "columns in order of activation": (quantization(desc_act=True), "config", "desc_act"),
        "zero points that vLLM refuses": (quantization(sym=False), "config", "quantization_config"),
        "no number of bits": (config(QUANTIZATION, bits=None), "config", "bits"),
        "no scales": (drop(f"{DOWN}.scales"), "completeness", f"{DOWN}.scales"),
        "no codes": (drop(f"{DOWN}.qweight"), "completeness", f"{DOWN}.qweight"),
        "a scale that is NaN": (filled(f"{DOWN}.scales", float("nan")), "values", f"{DOWN}.scales"),
        "scales that are far too large": (scaled(f"{DOWN}.scales", 3000), "values", f"{DOWN}.scales"),
        "columns in another order": (
            put(f"{DOWN}.g_idx", lambda value: value.flip(0)),
            "shapes",
            f"{DOWN}.g_idx",
        ),
        "zero points that vLLM drops": (
            put(f"{DOWN}.qzeros", lambda value: value ^ 3),
            "shapes",
            f"{DOWN}.qzeros",
        ),
        "codes of the inputs last": (transposed(f"{DOWN}.qweight"), "shapes", f"{DOWN}.qweight"),
        "codes of another dtype": (cast(f"{DOWN}.qweight", torch.float32), "shapes", f"{DOWN}.qweight"),
        "a part that is not quantized": (unquantized(K, (128, 256)), "targets", "qkv_proj"),
        "a rule that keeps what is quantized": (
            quantization(dynamic={"-:.*layers.1.mlp.down": {}}),
            "targets",
            DOWN,
        ),
        "a layer's norm gone": (drop(f"{LAYER}.input_layernorm.weight"), "completeness", "input_layernorm"),
        "codes all zero": (put(f"{DOWN}.qweight", torch.zeros_like), "values", DOWN),
    },
    "awq": {
        "other bits": (quantization(bits=8), "config", "quantization_config"),
        "other groups": (quantization(group_size=128), "shapes", "scales"),
        "another layout": (quantization(version="gemv"), "config", "version"),
        "no groups": (config(QUANTIZATION, group_size="all"), "config", "group_size"),
        "no zero points": (drop(f"{DOWN}.qzeros"), "completeness", f"{DOWN}.qzeros"),
        "no scales": (drop(f"{DOWN}.scales"), "completeness", f"{DOWN}.scales"),
        "an infinite scale": (filled(f"{DOWN}.scales", float("inf")), "values", f"{DOWN}.scales"),
        "scales that are zero": (put(f"{DOWN}.scales", torch.zeros_like), "values", f"{DOWN}.scales"),
        "packed along the inputs": (
            put(f"{DOWN}.qweight", lambda value: awq_packed(torch.zeros(256, 512))),
            "shapes",
            f"{DOWN}.qweight",
        ),
        "zero points the other way": (transposed(f"{DOWN}.qzeros"), "shapes", f"{DOWN}.qzeros"),
        "a list that keeps what is quantized": (
            quantization(modules_to_not_convert=["layers.1.mlp.down_proj"]),
            "targets",
            DOWN,
        ),
        "a list that keeps a part": (
            quantization(modules_to_not_convert=["layers.1.self_attn.k_proj"]),
            "targets",
            "qkv_proj",
        ),
        "a part that is not quantized": (unquantized(V, (128, 256)), "targets", "qkv_proj"),
        "codes all zero": (put(f"{DOWN}.qweight", torch.zeros_like), "values", DOWN),
    },
    "auto-round": {
        "other bits": (quantization(bits=8), "shapes", "qweight"),
        "other groups": (quantization(group_size=128), "shapes", "scales"),
        "zero points that vLLM refuses": (quantization(sym=False), "config", "quantization_config"),
        "another layout": (quantization(packing_format="auto_round:gptqmodel"), "config", "packing_format"),
        "the layout of AWQ": (quantization(packing_format="auto_round:auto_awq"), "shapes", "qweight"),
        "another type of data": (quantization(data_type="nv_fp"), "config", "data_type"),
        "no number of bits": (config(QUANTIZATION, bits=None), "config", "bits"),
        "a layer that its settings keep": (quantization(extra_config={DOWN: {"bits": 16}}), "targets", DOWN),
        "a part that its settings keep": (
            quantization(extra_config={K: {"bits": 16}}),
            "targets",
            "qkv_proj",
        ),
        "a pattern with other bits": (
            quantization(extra_config={r"layers\.1\.mlp\.down": {"bits": 8}}),
            "shapes",
            f"{DOWN}.qweight",
        ),
        "blocks that are not quantized": (
            quantization(block_name_to_quantize="model.layers.0"),
            "targets",
            DOWN,
        ),
        "no scales": (drop(f"{DOWN}.scales"), "completeness", f"{DOWN}.scales"),
        "a scale that is NaN": (filled(f"{DOWN}.scales", float("nan")), "values", f"{DOWN}.scales"),
        "codes of the inputs last": (transposed(f"{DOWN}.qweight"), "shapes", f"{DOWN}.qweight"),
    },
    "auto-round-mxfp4": {
        "other groups": (quantization(group_size=64), "config", "group_size"),
        "another layout": (quantization(packing_format="auto_round:auto_gptq"), "config", "packing_format"),
        "other bits": (quantization(bits=8), "completeness", f"{DOWN}.weight"),
        "zero points": (quantization(sym=False), "config", "group_size"),
        "no scales": (drop(f"{DOWN}.weight_scale"), "completeness", f"{DOWN}.weight_scale"),
        "no codes": (drop(f"{DOWN}.weight_packed"), "completeness", f"{DOWN}.weight_packed"),
        "one byte a code": (
            put(f"{GATE}.weight_packed", lambda value: value.repeat(1, 2)),
            "shapes",
            f"{GATE}.weight_packed",
        ),
        "scales as numbers": (put(f"{DOWN}.weight_scale", powers), "shapes", f"{DOWN}.weight_scale"),
        "a scale that is NaN": (filled(f"{DOWN}.weight_scale", 255), "values", f"{DOWN}.weight_scale"),
        "codes all zero": (put(f"{DOWN}.weight_packed", torch.zeros_like), "values", DOWN),
        "a layer that is not quantized": (unquantized(DOWN, (256, 512)), "targets", DOWN),
    },
    "quark-fp8": {
        "no export": (config(QUANTIZATION, export=None), "config", "export"),
        "a cache of which nothing is said": (quantization(layer_quant_config={}), "config", "kv_cache_group"),
        "another kind of weights": (
            quantization(global_quant_config={"weight": {"dtype": "fp6_e3m2"}}),
            "config",
            "global_quant_config",
        ),
        "inputs that are not quantized": (
            quantization(global_quant_config={"weight": QUARK_FP8, "input_tensors": None}),
            "config",
            "global_quant_config",
        ),
        "nothing that says how": (quantization(global_quant_config=None), "config", "global_quant_config"),
        "a layer that is excluded": (quantization(exclude=["lm_head", DOWN]), "targets", DOWN),
        "a part that is excluded": (quantization(exclude=["lm_head", K]), "targets", "qkv_proj"),
        "a pattern that keeps what is quantized": (
            quantization(exclude=["lm_head", r"re:.*layers\.1\.mlp"]),
            "targets",
            DOWN,
        ),
        "no scale": (drop(f"{DOWN}.weight_scale"), "completeness", f"{DOWN}.weight_scale"),
        "no scale of inputs": (drop(f"{DOWN}.input_scale"), "completeness", f"{DOWN}.input_scale"),
        "a scale upside down": (inverted(f"{DOWN}.weight_scale"), "values", f"{DOWN}.weight_scale"),
        "inputs of one layer scaled otherwise": (scaled(f"{K}.input_scale", 3), "fusion", "input_scale"),
        "a scale of keys that is zero": (filled(f"{K}.output_scale", 0.0), "kv_cache", "output_scale"),
        "a weight in e5m2": (
            put(f"{DOWN}.weight", lambda value: value.float().to(torch.float8_e5m2)),
            "shapes",
            f"{DOWN}.weight",
        ),
    },
    "quark-int4": {
        "other groups": (
            quantization(**quark_config({"dtype": "int4", "group_size": 128, "symmetric": True}, None)),
            "shapes",
            "weight_scale",
        ),
        "one scale a row": (
            quantization(**quark_config({"dtype": "int4", "group_size": None}, None)),
            "config",
            "global_quant_config",
        ),
        "packed by another method": (
            quantization(export={"kv_cache_group": [], "pack_method": "other"}),
            "config",
            "global_quant_config",
        ),
        "no scales": (drop(f"{DOWN}.weight_scale"), "completeness", f"{DOWN}.weight_scale"),
        "an infinite scale": (filled(f"{DOWN}.weight_scale", float("inf")), "values", f"{DOWN}.weight_scale"),
        "packed along the inputs": (
            put(f"{DOWN}.weight", lambda value: awq_packed(torch.zeros(256, 512))),
            "shapes",
            f"{DOWN}.weight",
        ),
        "codes of another dtype": (cast(f"{DOWN}.weight", torch.float32), "shapes", f"{DOWN}.weight"),
        "a part that is not quantized": (unquantized(V, (128, 256)), "targets", "v_proj"),
        "scales that are zero": (
            put(f"{DOWN}.weight_scale", torch.zeros_like),
            "values",
            f"{DOWN}.weight_scale",
        ),
    },
    "quark-int8": {
        "no scales": (drop(f"{DOWN}.weight_scale"), "completeness", f"{DOWN}.weight_scale"),
        "a weight that is cut": (
            put(f"{GATE}.weight", lambda value: value[:256]),
            "shapes",
            f"{GATE}.weight",
        ),
        "a negative scale": (filled(f"{DOWN}.weight_scale", -1.0), "values", f"{DOWN}.weight_scale"),
    },
    "quark-mxfp4": {
        "no scales": (drop(f"{DOWN}.weight_scale"), "completeness", f"{DOWN}.weight_scale"),
        "a scale that is NaN": (filled(f"{DOWN}.weight_scale", 255), "values", f"{DOWN}.weight_scale"),
        "scales as numbers": (put(f"{DOWN}.weight_scale", powers), "shapes", f"{DOWN}.weight_scale"),
        "codes all zero": (put(f"{DOWN}.weight", torch.zeros_like), "values", DOWN),
    },
    "fp8-block": {
        "other blocks": (quantization(weight_block_size=[64, 64]), "shapes", "weight_scale_inv"),
        "half a block": (quantization(weight_block_size=[128]), "config", "weight_block_size"),
        "static inputs": (quantization(activation_scheme="static"), "config", "activation_scheme"),
        "no word of inputs": (config(QUANTIZATION, activation_scheme="none"), "config", "activation_scheme"),
        "no scales": (drop(f"{DOWN}.weight_scale_inv"), "completeness", f"{DOWN}.weight_scale_inv"),
        "scales by compressed-tensors' name": (
            rename(f"{DOWN}.weight_scale_inv", f"{DOWN}.weight_scale"),
            "completeness",
            f"{DOWN}.weight_scale_inv",
        ),
        "scales upside down": (inverted(f"{DOWN}.weight_scale_inv"), "values", f"{DOWN}.weight_scale_inv"),
        "a negative scale": (filled(f"{DOWN}.weight_scale_inv", -1.0), "values", f"{DOWN}.weight_scale_inv"),
        "a weight that is NaN": (filled(f"{DOWN}.weight", float("nan")), "values", f"{DOWN}.weight"),
        "scales the other way": (
            transposed(f"{DOWN}.weight_scale_inv"),
            "shapes",
            f"{DOWN}.weight_scale_inv",
        ),
        "a weight as bytes": (
            put(f"{DOWN}.weight", lambda value: value.view(torch.uint8)),
            "shapes",
            f"{DOWN}.weight",
        ),
        "a layer that is not quantized": (unquantized(DOWN, (256, 512)), "targets", DOWN),
        "a list that keeps what is quantized": (quantization(modules_to_not_convert=[DOWN]), "targets", DOWN),
        "a list that keeps a part": (quantization(modules_to_not_convert=[K]), "targets", "qkv_proj"),
    },
    "fp8-static": {
        "no scale of inputs": (drop(f"{DOWN}.input_scale"), "completeness", f"{DOWN}.input_scale"),
        "inputs of one layer scaled otherwise": (scaled(f"{K}.input_scale", 3), "fusion", "input_scale"),
        "no scale": (drop(f"{DOWN}.weight_scale"), "completeness", f"{DOWN}.weight_scale"),
        "a scale upside down": (inverted(f"{DOWN}.weight_scale"), "values", f"{DOWN}.weight_scale"),
        "a scale that is zero": (filled(f"{DOWN}.weight_scale", 0.0), "values", f"{DOWN}.weight_scale"),
        "a scale for each row": (
            put(f"{DOWN}.weight_scale", lambda value: value.repeat(256)),
            "shapes",
            f"{DOWN}.weight_scale",
        ),
        "in blocks": (
            quantization(weight_block_size=[128, 128], activation_scheme="dynamic"),
            "completeness",
            "weight_scale_inv",
        ),
        "dynamic inputs": (quantization(activation_scheme="dynamic"), "completeness", "input_scale"),
        "a weight in e5m2": (
            put(f"{DOWN}.weight", lambda value: value.float().to(torch.float8_e5m2)),
            "shapes",
            f"{DOWN}.weight",
        ),
        "a scale of inputs that is NaN": (
            filled(f"{DOWN}.input_scale", float("nan")),
            "values",
            f"{DOWN}.input_scale",
        ),
    },
    "modelopt-fp8": {
        "no scale of inputs": (drop(f"{DOWN}.input_scale"), "completeness", f"{DOWN}.input_scale"),
        "another algorithm": (quantization(quant_algo="FP9"), "config", "quant_algo"),
        "another algorithm's scales": (
            quantization(quant_algo="FP8_PER_CHANNEL_PER_TOKEN"),
            "shapes",
            "weight_scale",
        ),
        "a head that is not kept": (quantization(ignore=[]), "targets", "lm_head"),
        "a pattern that keeps what is quantized": (
            quantization(ignore=["lm_head", "*layers.1.mlp*"]),
            "targets",
            DOWN,
        ),
        "a scale upside down": (inverted(f"{DOWN}.weight_scale"), "values", f"{DOWN}.weight_scale"),
        "inputs of one layer scaled otherwise": (scaled(f"{V}.input_scale", 3), "fusion", "input_scale"),
        "a layer that is not quantized": (unquantized(DOWN, (256, 512)), "targets", DOWN),
        "a weight too short": (put(f"{DOWN}.weight", lambda value: value[:200]), "shapes", f"{DOWN}.weight"),
        "a scale of inputs far too large": (
            scaled(f"{DOWN}.input_scale", 1e6),
            "values",
            f"{DOWN}.input_scale",
        ),
    },
    "modelopt-nvfp4": {
        "no second scale": (drop(f"{DOWN}.weight_scale_2"), "completeness", f"{DOWN}.weight_scale_2"),
        "a second scale upside down": (
            inverted(f"{DOWN}.weight_scale_2"),
            "values",
            f"{DOWN}.weight_scale_2",
        ),
        "a second scale of another layer": (scaled(f"{K}.weight_scale_2", 2), "fusion", "weight_scale_2"),
        "a second scale that is zero": (
            filled(f"{DOWN}.weight_scale_2", 0.0),
            "values",
            f"{DOWN}.weight_scale_2",
        ),
        "inputs of one layer scaled otherwise": (scaled(f"{Q}.input_scale", 3), "fusion", "input_scale"),
        "no scale of inputs": (drop(f"{DOWN}.input_scale"), "completeness", f"{DOWN}.input_scale"),
        "scales as bytes": (
            put(f"{DOWN}.weight_scale", lambda value: value.view(torch.uint8)),
            "shapes",
            f"{DOWN}.weight_scale",
        ),
        "a scale that is NaN": (
            filled(f"{DOWN}.weight_scale", float("nan")),
            "values",
            f"{DOWN}.weight_scale",
        ),
        "groups of 32": (quantization(group_size=32), "config", "group_size"),
        "no algorithm": (quantization(quant_algo=None), "config", "quant_algo"),
        "a head that is not kept": (quantization(ignore=["other"]), "targets", "lm_head"),
        "one byte a code": (
            put(f"{GATE}.weight", lambda value: value.repeat(1, 2)),
            "shapes",
            f"{GATE}.weight",
        ),
        "a scale of keys that is zero": (filled(f"{K}.k_scale", 0.0), "kv_cache", "k_scale"),
        "weights only, without a list": (quantization(quant_algo="W4A8_NVFP4_FP8"), "config", "quant_algo"),
    },
}
