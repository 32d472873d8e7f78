"""Rounding of activations to FP4 and FP8 values, as the GPU kernels round them, in plain torch."""

import torch
import torch.nn.functional as F

from vexport.numerics import E2M1_MAX, E4M3_MAX, MX_GROUP, NVFP4_GROUP
from vexport.numerics.tensors import E2M1, mx_scale, round_to

LEAST_NORMAL = torch.finfo(torch.float32).tiny


def fake_nvfp4(activations: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Quantize to NVFP4 and back: (tokens, features) in its own dtype, features a multiple of 16.

    `global_scale` is the stored one, float32. The block scale is rounded to e4m3 relative to it, as
    in vLLM's `ref_nvfp4_quant` (layers/quantization/utils/nvfp4_emulation_utils.py).
    """
    blocks = activations.to(torch.float32).reshape(activations.shape[0], -1, NVFP4_GROUP)
    scale = global_scale * (blocks.abs().amax(dim=-1, keepdim=True) * (1 / E2M1_MAX))
    scale = scale.clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    inverse = _reciprocal(scale * _reciprocal(global_scale))
    rounded = round_to(blocks * inverse, E2M1) * (scale / global_scale)
    return rounded.reshape(activations.shape).to(activations.dtype)


def fake_mxfp4(activations: torch.Tensor) -> torch.Tensor:
    """Quantize to MXFP4 and back: (tokens, features) in its own dtype, features a multiple of 32.

    The smallest scale is no subnormal number: compiled code may take those for zero, and zeros
    divided by it would become NaN.
    """
    blocks = activations.to(torch.float32).reshape(activations.shape[0], -1, MX_GROUP)
    scale = mx_scale(blocks.abs().amax(dim=-1, keepdim=True), E2M1).clamp_(min=LEAST_NORMAL)
    rounded = round_to(blocks / scale, E2M1) * scale
    return rounded.reshape(activations.shape).to(activations.dtype)


def fp8_token_scale(activations: torch.Tensor) -> torch.Tensor:
    """Dynamic FP8 scales, one a token: float32 (tokens, 1), absmax / 448, never zero.

    The floor is vLLM's (layers/quantization/input_quant_fp8.py).
    """
    largest = activations.abs().amax(dim=-1, keepdim=True).to(torch.float32)
    return (largest / E4M3_MAX).clamp_(min=1.0 / (E4M3_MAX * 512.0))


def round_fp8(activations: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The e4m3 values of activations / scale, saturating at 448, in the dtype of the activations.

    bfloat16 and float16 hold every e4m3 value exactly.
    """
    scaled = activations.to(torch.float32) * scale.to(torch.float32).reciprocal()
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(activations.dtype)


def fake_fp8(activations: torch.Tensor, group: int) -> torch.Tensor:
    """Quantize to e4m3 and back: (tokens, features) in its own dtype, a scale for every `group`
    features.

    One for each token where `group` is -1, as vLLM's `GroupShape` has it. The last group may be
    smaller.
    """
    tokens, features = activations.shape
    size = group if group > 0 else features
    groups = F.pad(activations, (0, -features % size)).reshape(tokens, -1, size)
    scale = fp8_token_scale(groups)
    rounded = round_fp8(groups, scale).to(torch.float32) * scale
    return rounded.reshape(tokens, -1)[:, :features].to(activations.dtype)


def _reciprocal(value: torch.Tensor) -> torch.Tensor:
    """1 / value, and close to zero where value is zero: vLLM's `get_reciprocal`."""
    return torch.reciprocal(value + (value == 0) * 1e8)
