"""Micro checkpoints of other quantization methods.

They are packed like the producers' sources pack them.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from shutil import copytree

import torch

from tests.mutations.edits import WHOLE, Tensors, config, tensors
from vexport.records import Json

# The stored tensors of a layer, and its weight (out, in) by the formula of the producer.
Packed = tuple[Tensors, torch.Tensor]
Pack = Callable[[torch.Tensor, torch.Tensor], Packed]
GROUP = 64
BLOCK = 128
# AutoAWQ: WQLinear_GEMM.from_linear in awq/modules/linear/gemm.py.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def pack_rows(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack values into words of 32 bits (AutoGPTQ's pack).

    The first value of a word is in its lowest bits.
    """
    words = values.to(torch.int64).reshape(-1, 32 // bits, values.shape[1])
    shifts = torch.arange(0, 32, bits).reshape(1, -1, 1)
    return (words << shifts).sum(dim=1).to(torch.uint32).view(torch.int32)


def pack_awq(values: torch.Tensor) -> torch.Tensor:
    """Pack codes of 4 bits along the outputs, in AutoAWQ's order."""
    words = values.to(torch.int64).reshape(values.shape[0], -1, 8)[:, :, AWQ_ORDER]
    return (words << torch.arange(0, 32, 4)).sum(dim=2).to(torch.uint32).view(torch.int32)


def divided(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Divide values by their scales. A zero stays zero if its scale is zero."""
    return (values / scales).nan_to_num(nan=0.0)


def symmetric(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scales (out, groups), signed codes (out, in), and the dequantized values."""
    half = 1 << (bits - 1)
    grouped = weight.float().reshape(weight.shape[0], -1, GROUP)
    scales = (grouped.abs().amax(dim=2) / (half - 1)).half()
    signed = divided(grouped, scales[:, :, None].float()).round().clamp(-half, half - 1)
    dequantized = scales[:, :, None] * signed.half()
    return scales, signed.reshape(weight.shape), dequantized.reshape(weight.shape)


def gptq(weight: torch.Tensor, bits: int = 4, *, stored_zero: int = -1) -> Packed:
    """Quantize symmetrically.

    `stored_zero` is added to the zero points: -1 for the checkpoint_format gptq, 0 for gptq_v2.
    """
    half = 1 << (bits - 1)
    scales, signed, dequantized = symmetric(weight, bits)
    stored = {
        "qweight": pack_rows((signed + half).T, bits),
        "qzeros": pack_rows(torch.full(scales.shape, half + stored_zero), bits).T,
        "scales": scales.T,
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }
    return stored, dequantized


def awq(weight: torch.Tensor) -> Packed:
    """Quantize to codes of 4 bits with zero points, packed along the outputs in AutoAWQ's order."""
    grouped = weight.float().reshape(weight.shape[0], -1, GROUP)
    low, high = grouped.amin(dim=2).clamp_max(0), grouped.amax(dim=2).clamp_min(0)
    scales = ((high - low) / 15).half()
    zeros = divided(-low, scales.float()).round().clamp(0, 15)
    codes = (divided(grouped, scales[:, :, None].float()) + zeros[:, :, None]).round().clamp(0, 15)
    packed, zero_points = pack_awq(codes.reshape(weight.shape).T), pack_awq(zeros.T)
    dequantized = (scales[:, :, None] * (codes - zeros[:, :, None]).half()).reshape(weight.shape)
    return {"qweight": packed, "qzeros": zero_points, "scales": scales.T}, dequantized


def fp8_block(weight: torch.Tensor) -> Packed:
    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.reshape(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = divided(blocks, scale[:, None, :, None]).to(torch.float8_e4m3fn)
    dequantized = (codes.float() * scale[:, None, :, None]).reshape(whole.shape)[:rows, :columns]
    return {
        "weight": codes.reshape(whole.shape)[:rows, :columns],
        "weight_scale_inv": scale,
    }, dequantized


def fp8_tensor(weight: torch.Tensor, largest: torch.Tensor, *, static: bool = True) -> Packed:
    scale = largest / 448
    inputs = {"input_scale": torch.tensor(0.02)} if static else {}
    codes = divided(weight.float(), scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, **inputs}, codes.float() * scale


def e2m1(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes (two per byte) of numbers, and the dequantized values."""
    nearest = (scaled.abs()[..., None] - FP4).abs().argmin(dim=-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, FP4[nearest] * torch.where(scaled < 0, -1, 1)


def nvfp4(weight: torch.Tensor, largest: torch.Tensor) -> Packed:
    """Quantize like ModelOpt's NVFP4QTensor.quantize.

    The lower half of a byte is the first code.
    """
    second = largest / (6 * 448)
    grouped = weight.float().reshape(weight.shape[0], -1, 16)
    scale = divided(grouped.abs().amax(dim=2) / 6, second).clamp_max(448).to(torch.float8_e4m3fn)
    whole = (scale.float() * second)[:, :, None]
    codes, values = e2m1(divided(grouped, whole))
    stored = {"weight": codes.flatten(1), "weight_scale": scale, "weight_scale_2": second}
    return {**stored, "input_scale": torch.tensor(0.003)}, (values * whole).reshape(weight.shape)


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize to MXFP4 in groups of 32 along the last dimension.

    Return the codes (two per byte), the biased exponents, and the dequantized values.
    """
    grouped = weight.float().reshape(*weight.shape[:-1], -1, 32)
    exponent = grouped.abs().amax(dim=-1).clamp_min(2.0**-100).log2().floor() - 2
    codes, values = e2m1((grouped / exponent.exp2()[..., None]).clamp(-6, 6))
    dequantized = (values * exponent.exp2()[..., None]).reshape(weight.shape)
    return codes, (exponent + 127).to(torch.uint8), dequantized


def stored_mxfp4(weight: torch.Tensor, name: str) -> Packed:
    packed, scales, dequantized = mxfp4(weight)
    return {name: packed.flatten(1), "weight_scale": scales}, dequantized


def quark_uint4(weight: torch.Tensor) -> Packed:
    """Quantize like AWQ, with Quark's names of the tensors."""
    stored, dequantized = awq(weight)
    names = {"qweight": "weight", "qzeros": "weight_zero_point", "scales": "weight_scale"}
    return {name: stored[old] for old, name in names.items()}, dequantized


def quark_int4(weight: torch.Tensor) -> Packed:
    """Quantize to signed codes in AWQ's layout."""
    scales, signed, dequantized = symmetric(weight, 4)
    packed = pack_awq((signed.to(torch.int64) & 15).T)
    zeros = torch.zeros(scales.shape[1], packed.shape[1], dtype=torch.int32)
    return {"weight": packed, "weight_scale": scales.T, "weight_zero_point": zeros}, dequantized


def quark_int8(weight: torch.Tensor) -> Packed:
    scale = weight.float().abs().amax(dim=1) / 127
    codes = divided(weight.float(), scale[:, None]).round().to(torch.int8)
    zeros = torch.zeros(scale.shape, dtype=torch.int8)
    stored = {"weight": codes, "weight_scale": scale, "weight_zero_point": zeros}
    return stored, codes.float() * scale[:, None]


def _integers(method: str, bits: int = 4, **more: Json) -> Mapping[str, Json]:
    return {"quant_method": method, "bits": bits, "group_size": GROUP, **more}


def _modelopt(algo: str, **more: Json) -> Mapping[str, Json]:
    header: Json = {"name": "modelopt", "version": "0.44.0"}
    return {
        "quant_method": "modelopt",
        "quant_algo": algo,
        "ignore": ["lm_head"],
        "producer": header,
        **more,
    }


def _auto_round(layout: str, **more: Json) -> Mapping[str, Json]:
    """Return a config as AutoRound 0.16 writes it."""
    kept: Json = {"lm_head": {"bits": 16, "data_type": "fp"}}
    usual = _integers(
        "auto-round", data_type="int", sym=True, packing_format=f"auto_round:{layout}"
    )
    where: Mapping[str, Json] = {"block_name_to_quantize": "model.layers", "extra_config": kept}
    return {**usual, **where, "autoround_version": "0.16.1", **more}


def quark_config(weight: Json, inputs: Json, **more: Json) -> Mapping[str, Json]:
    """Return a config in the form of Quark 0.13, without keys that vLLM ignores."""
    layers: Json = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark",
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
        "global_quant_config": layers,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        **more,
    }


def _scheme(dtype: str, qscheme: str, **more: Json) -> dict[str, Json]:
    return {"dtype": dtype, "qscheme": qscheme, "is_dynamic": False, "symmetric": True, **more}


QUARK_FP8 = _scheme("fp8_e4m3", "per_tensor")
QUARK_EXPORT: Json = {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"}
QUARK_CACHE: Json = dict.fromkeys(("weight", "input_tensors", "output_tensors"), QUARK_FP8) | {
    "bias": None
}
QUARK_LAYERS: Json = {"*k_proj": QUARK_CACHE, "*v_proj": QUARK_CACHE}
QUARK_FP4: Mapping[str, Json] = {"group_size": 32, "scale_format": "e8m0"}
GPTQ_CONFIG = _integers("gptq", desc_act=False, sym=True)
FP8_CONFIG: Mapping[str, Json] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FP8_KV: Json = {"dynamic": False, "num_bits": 8, "type": "float"}


def without_largest(pack: Callable[..., Packed], **options: str | int) -> Pack:
    """Adapt a packing function that uses only the layer's weight."""
    return lambda weight, largest: pack(weight, **options)


# The config of a method, and the function that packs a layer. It receives the weight, and the
# largest weight of the fused layers.
CHECKPOINTS: Mapping[str, tuple[Mapping[str, Json], Pack]] = {
    "gptq": ({**GPTQ_CONFIG, "lm_head": False}, without_largest(gptq)),
    "gptq_v2": (
        {**GPTQ_CONFIG, "checkpoint_format": "gptq_v2"},
        without_largest(gptq, stored_zero=0),
    ),
    "gptq-8bit": ({**GPTQ_CONFIG, "bits": 8}, without_largest(gptq, bits=8)),
    "awq": (_integers("awq", zero_point=True, version="gemm"), without_largest(awq)),
    "auto-round": (_auto_round("auto_gptq"), without_largest(gptq)),
    "auto-round-awq": (_auto_round("auto_awq"), without_largest(awq)),
    "auto-round-mxfp4": (
        _auto_round("llm_compressor", data_type="mx_fp", group_size=32, act_bits=4),
        without_largest(stored_mxfp4, name="weight_packed"),
    ),
    "fp8-block": (
        {**FP8_CONFIG, "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
        without_largest(fp8_block),
    ),
    "fp8-static": (
        {**FP8_CONFIG, "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        fp8_tensor,
    ),
    "fp8-dynamic": (FP8_CONFIG, partial(fp8_tensor, static=False)),
    "quark-fp8": (
        quark_config(QUARK_FP8, QUARK_FP8, export=QUARK_EXPORT, layer_quant_config=QUARK_LAYERS),
        fp8_tensor,
    ),
    "quark-int8": (
        quark_config(
            _scheme("int8", "per_channel"),
            _scheme("int8", "per_channel", is_dynamic=True),
        ),
        without_largest(quark_int8),
    ),
    "quark-int4": (
        quark_config(_scheme("int4", "per_group", group_size=GROUP), None),
        without_largest(quark_int4),
    ),
    "quark-uint4": (
        quark_config({"dtype": "uint4", "group_size": GROUP, "symmetric": False}, None),
        without_largest(quark_uint4),
    ),
    "quark-mxfp4": (
        quark_config(
            _scheme("fp4", "per_group", **QUARK_FP4),
            _scheme("fp4", "per_group", is_dynamic=True),
        ),
        without_largest(stored_mxfp4, name="weight"),
    ),
    "modelopt-fp8": (_modelopt("FP8"), fp8_tensor),
    "modelopt-nvfp4": (_modelopt("NVFP4", group_size=16, kv_cache_scheme=FP8_KV), nvfp4),
}
# Names of the KV cache's scales within the layers of keys and values.
CACHE_SCALES = {"modelopt-nvfp4": "{}_scale", "quark-fp8": "output_scale"}
FUSED = (
    *(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
    *(("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3")),
)
QUANTIZED = re.compile(r"(_proj(_with_mqa)?|\.w[123])\.weight$")


def write(name: str, source: Path, folder: Path, **changes: Json) -> Path:
    """Quantize the checkpoint `source` by a method into a new folder.

    `changes` apply to the config.
    """
    settings, pack = CHECKPOINTS[name]

    @tensors
    def quantize(values: Tensors) -> None:
        exact = dict(values)
        for weight in filter(QUANTIZED.search, exact):
            module = weight.removesuffix(".weight")
            prefix, _, projection = module.rpartition(".")
            parts = next((each for each in FUSED if projection in each), (projection,))
            fused = [exact[each] for part in parts if (each := f"{prefix}.{part}.weight") in exact]
            largest = torch.stack([each.float().abs().max() for each in fused]).max()
            stored, _ = pack(values.pop(weight), largest)
            values |= {f"{module}.{part}": value.contiguous() for part, value in stored.items()}
            if name in CACHE_SCALES and projection in ("k_proj", "v_proj"):
                values[f"{module}.{CACHE_SCALES[name].format(projection[0])}"] = torch.tensor(0.02)

    copytree(source, folder)
    quantize(folder)
    config(WHOLE, quantization_config={**settings, **changes})(folder)
    return folder


def write_experts(name: str, source: Path, folder: Path) -> Path:
    """Quantize a mixture of experts by a method.

    Routers are in the method's ignore list, as producers write it.
    """
    gates: list[Json] = [f"model.layers.{number}.mlp.gate" for number in range(2)]
    lists: Mapping[str, dict[str, Json]] = {
        "fp8-block": {"modules_to_not_convert": ["lm_head", *gates]},
        "modelopt-nvfp4": {"ignore": ["lm_head", *gates]},
    }
    return write(name, source, folder, **lists.get(name, {}))


@tensors
def _experts_in_mxfp4(values: Tensors) -> None:
    for name in [
        name for name in values if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
    ]:
        blocks, scales, _ = mxfp4(values.pop(name).transpose(1, 2).contiguous())
        values |= {f"{name}_blocks": blocks, f"{name}_scales": scales}


def write_gpt_oss(source: Path, folder: Path) -> Path:
    """Write a micro gpt-oss as OpenAI publishes it: experts in MXFP4, outputs before inputs."""
    layers = [f"model.layers.*.{name}" for name in ("self_attn", "mlp.router")]
    kept: list[Json] = [*layers, "model.embed_tokens", "lm_head"]
    method: Json = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    copytree(source, folder)
    _experts_in_mxfp4(folder)
    config(WHOLE, quantization_config=method)(folder)
    return folder
