"""Micro checkpoints of other quantization methods, packed as their producers pack (read in their sources)."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copytree

import torch
from safetensors.torch import load_file, save_file

from vexport.records import Json

Tensors = dict[str, torch.Tensor]
GROUP = 64
BLOCK = 128
# AutoAWQ: WQLinear_GEMM.from_linear in awq/modules/linear/gemm.py.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
HEADER: Json = {"name": "modelopt", "version": "0.44.0"}
FP8_KV: Json = {"dynamic": False, "num_bits": 8, "type": "float"}


def packed_along_rows(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Words of 32 bits, the first of the values that share a word in its lowest bits (AutoGPTQ's pack)."""
    words = values.to(torch.int64).reshape(-1, 32 // bits, values.shape[1])
    shifts = torch.arange(0, 32, bits).reshape(1, -1, 1)
    return (words << shifts).sum(dim=1).to(torch.uint32).view(torch.int32)


def gptq(weight: torch.Tensor, bits: int = 4, *, stored_zero: int = -1) -> Tensors:
    """Symmetric codes; `stored_zero` is added to the zero points: -1 in checkpoint_format gptq, 0 in v2."""
    half = 1 << (bits - 1)
    grouped = weight.float().reshape(weight.shape[0], -1, GROUP)
    scales = (grouped.abs().amax(dim=2) / (half - 1)).half()
    codes = (grouped / scales[:, :, None].float()).round().clamp(-half, half - 1) + half
    zeros = torch.full((scales.shape[1], weight.shape[0]), half + stored_zero)
    return {
        "qweight": packed_along_rows(codes.reshape(weight.shape).T, bits),
        "qzeros": packed_along_rows(zeros.T, bits).T,
        "scales": scales.T,
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }


def awq(weight: torch.Tensor) -> Tensors:
    """Codes of 4 bits with zero points, packed along the outputs in AutoAWQ's order."""
    grouped = weight.float().reshape(weight.shape[0], -1, GROUP)
    low, high = grouped.amin(dim=2).clamp_max(0), grouped.amax(dim=2).clamp_min(0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (grouped / scales[:, :, None].float() + zeros[:, :, None]).round().clamp(0, 15)
    return {
        "qweight": awq_packed(codes.reshape(weight.shape).T),
        "qzeros": awq_packed(zeros.T),
        "scales": scales.T,
    }


def awq_packed(values: torch.Tensor) -> torch.Tensor:
    words = values.to(torch.int64).reshape(values.shape[0], -1, 8)[:, :, AWQ_ORDER]
    return (words << torch.arange(0, 32, 4)).sum(dim=2).to(torch.uint32).view(torch.int32)


def fp8_block(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.reshape(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(whole.shape).to(torch.float8_e4m3fn)
    return {"weight": codes[:rows, :columns], "weight_scale_inv": scale}


def fp8_tensor(weight: torch.Tensor, largest: torch.Tensor, *, static: bool = True) -> Tensors:
    scale = largest / 448
    inputs = {"input_scale": torch.tensor(0.02)} if static else {}
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale, **inputs}


def nvfp4(weight: torch.Tensor, largest: torch.Tensor) -> Tensors:
    """ModelOpt: NVFP4QTensor.quantize; the lower half of a byte is the first of two codes."""
    second = largest / (6 * 448)
    grouped = weight.float().reshape(weight.shape[0], -1, 16)
    scale = (grouped.abs().amax(dim=2) / 6 / second).clamp_max(448).to(torch.float8_e4m3fn)
    scaled = grouped / (scale.float() * second)[:, :, None]
    codes = (scaled.abs()[..., None] - FP4).abs().argmin(dim=-1) + 8 * (scaled < 0)
    codes = codes.reshape(weight.shape).to(torch.uint8)
    return {
        "weight": codes[:, 0::2] | codes[:, 1::2] << 4,
        "weight_scale": scale,
        "weight_scale_2": second,
        "input_scale": torch.tensor(0.003),
    }


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, two to the byte, and biased exponents of groups of 32 along the last dimension."""
    grouped = weight.float().reshape(*weight.shape[:-1], -1, 32)
    exponent = grouped.abs().amax(dim=-1).clamp_min(2.0**-100).log2().floor() - 2
    scaled = (grouped / exponent.exp2()[..., None]).clamp(-6, 6)
    codes = (scaled.abs()[..., None] - FP4).abs().argmin(dim=-1) + 8 * (scaled < 0)
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def _modelopt(algo: str, **more: Json) -> Mapping[str, Json]:
    return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"], "producer": HEADER, **more}


def _auto_round(layout: str, **more: Json) -> Mapping[str, Json]:
    """As AutoRound 0.16 writes it."""
    kept: Json = {"lm_head": {"bits": 16, "data_type": "fp"}}
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "data_type": "int",
        "group_size": GROUP,
        "sym": True,
        "packing_format": f"auto_round:{layout}",
        "block_name_to_quantize": "model.layers",
        "extra_config": kept,
        "autoround_version": "0.16.1",
        **more,
    }


def stored_mxfp4(weight: torch.Tensor) -> Tensors:
    packed, scales = mxfp4(weight)
    return {"weight_packed": packed.flatten(1), "weight_scale": scales}


def quark_config(weight: Json, inputs: Json, **more: Json) -> Mapping[str, Json]:
    """As Quark 0.13 writes it, without what vLLM does not read."""
    return {
        "quant_method": "quark",
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
        "global_quant_config": {
            "weight": weight,
            "input_tensors": inputs,
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        **more,
    }


def _side(dtype: str, qscheme: str, **more: Json) -> dict[str, Json]:
    usual: dict[str, Json] = {"is_dynamic": False, "symmetric": True}
    return {"dtype": dtype, "qscheme": qscheme, **usual, **more}


def quark_int4(weight: torch.Tensor, *, symmetric: bool) -> Tensors:
    """AWQ's layout under other names; symmetric codes have a sign."""
    if not symmetric:
        stored = awq(weight)
        names = {"qweight": "weight", "qzeros": "weight_zero_point", "scales": "weight_scale"}
        return {name: stored[old] for old, name in names.items()}
    grouped = weight.float().reshape(weight.shape[0], -1, GROUP)
    scales = (grouped.abs().amax(dim=2) / 7).half()
    codes = (grouped / scales[:, :, None].float()).round().clamp(-8, 7).to(torch.int64) & 15
    packed = awq_packed(codes.reshape(weight.shape).T)
    zeros = torch.zeros(scales.shape[1], packed.shape[1], dtype=torch.int32)
    return {"weight": packed, "weight_scale": scales.T, "weight_zero_point": zeros}


def quark_int8(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(dim=1) / 127
    codes = (weight.float() / scale[:, None]).round().to(torch.int8)
    zeros = torch.zeros(scale.shape, dtype=torch.int8)
    return {"weight": codes, "weight_scale": scale, "weight_zero_point": zeros}


def quark_mxfp4(weight: torch.Tensor) -> Tensors:
    packed, scales = mxfp4(weight)
    return {"weight": packed.flatten(1), "weight_scale": scales}


QUARK_FP8 = _side("fp8_e4m3", "per_tensor")
QUARK_EXPORT: Json = {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"}
QUARK_CACHE: Json = {
    "weight": QUARK_FP8,
    "input_tensors": QUARK_FP8,
    "output_tensors": QUARK_FP8,
    "bias": None,
}
QUARK_LAYERS: Json = {"*k_proj": QUARK_CACHE, "*v_proj": QUARK_CACHE}
QUARK_FP4: Mapping[str, Json] = {"group_size": 32, "scale_format": "e8m0"}


# The config of each, and its layers from a weight and the largest weight of those that vLLM runs as one.
CHECKPOINTS: Mapping[str, tuple[Mapping[str, Json], Callable[[torch.Tensor, torch.Tensor], Tensors]]] = {
    "gptq": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": True,
            "lm_head": False,
        },
        lambda weight, largest: gptq(weight),
    ),
    "gptq_v2": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": True,
            "checkpoint_format": "gptq_v2",
        },
        lambda weight, largest: gptq(weight, stored_zero=0),
    ),
    "gptq-8bit": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False, "sym": True},
        lambda weight, largest: gptq(weight, 8),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        lambda weight, largest: awq(weight),
    ),
    "auto-round": (_auto_round("auto_gptq"), lambda weight, largest: gptq(weight)),
    "auto-round-awq": (_auto_round("auto_awq"), lambda weight, largest: awq(weight)),
    "auto-round-mxfp4": (
        _auto_round("llm_compressor", data_type="mx_fp", group_size=32, act_bits=4),
        lambda weight, largest: stored_mxfp4(weight),
    ),
    "fp8-block": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
        },
        lambda weight, largest: fp8_block(weight),
    ),
    "fp8-static": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        lambda weight, largest: fp8_tensor(weight, largest),
    ),
    "fp8-dynamic": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda weight, largest: fp8_tensor(weight, largest, static=False),
    ),
    "quark-fp8": (
        quark_config(QUARK_FP8, QUARK_FP8, export=QUARK_EXPORT, layer_quant_config=QUARK_LAYERS),
        lambda weight, largest: fp8_tensor(weight, largest),
    ),
    "quark-int8": (
        quark_config(_side("int8", "per_channel"), _side("int8", "per_channel", is_dynamic=True)),
        lambda weight, largest: quark_int8(weight),
    ),
    "quark-int4": (
        quark_config(_side("int4", "per_group", group_size=GROUP), None),
        lambda weight, largest: quark_int4(weight, symmetric=True),
    ),
    "quark-uint4": (
        quark_config({"dtype": "uint4", "group_size": GROUP, "symmetric": False}, None),
        lambda weight, largest: quark_int4(weight, symmetric=False),
    ),
    "quark-mxfp4": (
        quark_config(_side("fp4", "per_group", **QUARK_FP4), _side("fp4", "per_group", is_dynamic=True)),
        lambda weight, largest: quark_mxfp4(weight),
    ),
    "modelopt-fp8": (_modelopt("FP8"), lambda weight, largest: fp8_tensor(weight, largest)),
    "modelopt-nvfp4": (
        _modelopt("NVFP4", group_size=16, kv_cache_scheme=FP8_KV),
        lambda weight, largest: nvfp4(weight, largest),
    ),
}
# Names of the KV cache's scales within the layers of keys and values.
CACHE_SCALES = {"modelopt-nvfp4": "{}_scale", "quark-fp8": "output_scale"}
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)
QUANTIZED = re.compile(r"_proj(_with_mqa)?$|\.w[123]$")


def write(name: str, source: Path, folder: Path, **changes: Json) -> Path:
    """The checkpoint `source` quantized by a method, in a new folder; `changes` go to its config."""
    config, quantized = CHECKPOINTS[name]
    config = {**config, **changes}
    copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    written: Tensors = {}
    for key, value in tensors.items():
        module, _, parameter = key.rpartition(".")
        if not QUANTIZED.search(module) or parameter != "weight":
            written[key] = value
            continue
        prefix, _, projection = module.rpartition(".")
        parts = next((each for each in FUSED if projection in each), (projection,))
        largest = torch.stack(
            [
                tensors[f"{prefix}.{part}.weight"].float().abs().max()
                for part in parts
                if f"{prefix}.{part}.weight" in tensors
            ]
        ).max()
        for part, tensor in quantized(value, largest).items():
            written[f"{module}.{part}"] = tensor.contiguous()
        if name in CACHE_SCALES and projection in ("k_proj", "v_proj"):
            written[f"{module}.{CACHE_SCALES[name].format(projection[0])}"] = torch.tensor(0.02)
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((folder / "config.json").read_text())
    whole["quantization_config"] = dict(config)
    (folder / "config.json").write_text(json.dumps(whole, indent=2))
    return folder


def write_gpt_oss(source: Path, folder: Path, **changes: Json) -> Path:
    """A micro gpt-oss as OpenAI publishes it: experts in MXFP4, outputs before inputs."""
    copytree(source, folder)
    written: Tensors = {}
    for key, value in load_file(source / "model.safetensors").items():
        if key.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            blocks, scales = mxfp4(value.transpose(1, 2).contiguous())
            written |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        else:
            written[key] = value
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((folder / "config.json").read_text())
    kept: list[Json] = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    whole["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps({**whole, **changes}, indent=2))
    return folder
