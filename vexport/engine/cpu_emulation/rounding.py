"""Rounding of activations to FP4 and FP8 values, as the GPU kernels round them, in plain torch."""

import torch
import torch.nn.functional as F

from vexport.numerics import E2M1_MAX, E4M3_MAX, MX_GROUP, NVFP4_GROUP
from vexport.numerics.tensors import E2M1, mx_scale, round_to

MIN_NORMAL = torch.finfo(torch.float32).tiny


def fake_nvfp4(activations: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Quantize activations to NVFP4 and back.

    `activations` are (tokens, features) in any dtype, features a multiple of 16. The result has the
    same dtype. `global_scale` is the stored global scale, float32. The block scale is rounded to
    e4m3 relative to it, as in vLLM's
    `ref_nvfp4_quant` (layers/quantization/utils/nvfp4_emulation_utils.py).
    """
    blocks = activations.to(torch.float32).reshape(activations.shape[0], -1, NVFP4_GROUP)
    scale = global_scale * (blocks.abs().amax(dim=-1, keepdim=True) * (1 / E2M1_MAX))
    scale = scale.clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    inverse = _reciprocal(scale * _reciprocal(global_scale))
    rounded = round_to(blocks * inverse, E2M1) * (scale / global_scale)
    return rounded.reshape(activations.shape).to(activations.dtype)


def fake_mxfp4(activations: torch.Tensor) -> torch.Tensor:
    """Quantize activations to MXFP4 and back.

    `activations` are (tokens, features) in any dtype, features a multiple of 32. The result has the
    same dtype. The smallest scale is not a subnormal number. Compiled code may replace subnormal
    numbers by zero, and zeros divided by zero are NaN.
    """
    blocks = activations.to(torch.float32).reshape(activations.shape[0], -1, MX_GROUP)
    scale = mx_scale(blocks.abs().amax(dim=-1, keepdim=True), E2M1).clamp_(min=MIN_NORMAL)
    rounded = round_to(blocks / scale, E2M1) * scale
    return rounded.reshape(activations.shape).to(activations.dtype)


def fp8_token_scale(activations: torch.Tensor) -> torch.Tensor:
    """Return dynamic FP8 scales, one per token: absmax / 448, never zero.

    `activations` are (..., features), and the scales are float32 (..., 1). vLLM has the same lower
    bound (layers/quantization/input_quant_fp8.py).
    """
    largest = activations.abs().amax(dim=-1, keepdim=True).to(torch.float32)
    return (largest / E4M3_MAX).clamp_(min=1.0 / (E4M3_MAX * 512.0))


def round_fp8(activations: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the e4m3 values of activations / scale, saturated at 448.

    The result has the dtype of the activations.

    bfloat16 and float16 hold every e4m3 value exactly.
    """
    scaled = activations.to(torch.float32) * scale.to(torch.float32).reciprocal()
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(activations.dtype)


def fake_fp8(activations: torch.Tensor, group: int) -> torch.Tensor:
    """Quantize activations to e4m3 and back, with a scale for every `group` features.

    `activations` are (tokens, features) in any dtype. The result has the same dtype. If `group` is
    -1, there is a scale for each token, as in vLLM's `GroupShape`. The last group may be smaller.
    """
    tokens, features = activations.shape
    size = group if group > 0 else features
    groups = F.pad(activations, (0, -features % size)).reshape(tokens, -1, size)
    scale = fp8_token_scale(groups)
    rounded = round_fp8(groups, scale).to(torch.float32) * scale
    return rounded.reshape(tokens, -1)[:, :features].to(activations.dtype)


def _reciprocal(value: torch.Tensor) -> torch.Tensor:
    """Return 1 / value, or a number close to zero if value is zero, as vLLM's `get_reciprocal`."""
    return torch.reciprocal(value + (value == 0) * 1e8)
