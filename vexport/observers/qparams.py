"""The formulas from a range to scale, zero point and global scale, all in float32.

Symmetric scales are absmax / (range / 2): FP4 /6, FP8 /448, INT4 /7.5, INT8 /127.5
(compressed_tensors/quantization/utils/helpers.py, calculate_qparams).
"""

import torch

from vexport.observers.args import ObserverArgs

FP4_MAX = 6.0
FP8_MAX = 448.0
# The global scale maps the largest block scale to the largest e4m3 value (generate_gparam, same file).
GLOBAL_SCALE_NUMERATOR = FP8_MAX * FP4_MAX
# What a zero scale becomes: the step of e4m3 at one for block scales, of float32 otherwise
# (calculate_qparams: `torch.finfo(dtype).eps`).
E4M3_EPS = 0.125
FLOAT32_EPS = float(torch.finfo(torch.float32).eps)


def quantized_range(args: ObserverArgs) -> tuple[float, float]:
    """Smallest and largest representable value."""
    if str(getattr(args.type, "value", args.type)) == "int":
        return -(2.0 ** (args.num_bits - 1)), 2.0 ** (args.num_bits - 1) - 1
    largest = {4: FP4_MAX, 8: FP8_MAX}.get(args.num_bits)
    if largest is None:
        raise ValueError(f"float with {args.num_bits} bits: need 4 (e2m1) or 8 (e4m3)")
    return -largest, largest


def global_scale_of(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """448 * 6 / absmax over all elements: float32, shape (1,); 1 where everything is zero."""
    absmax = torch.maximum(low.abs().amax(), high.abs().amax()).to(torch.float32).reshape(1)
    return torch.where(absmax > 0, GLOBAL_SCALE_NUMERATOR / absmax, torch.ones_like(absmax))


def scale_and_zero_point(
    low: torch.Tensor, high: torch.Tensor, args: ObserverArgs, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (float32, shape of `low`) and zero points (int32) for the ranges [low, high].

    With a global scale, block scales are what NVFP4 stores: relative to it and rounded to e4m3.
    """
    low = torch.minimum(low.to(torch.float32), torch.zeros((), device=low.device))
    high = torch.maximum(high.to(torch.float32), torch.zeros((), device=high.device))
    smallest, largest = quantized_range(args)
    if args.symmetric:
        scale = torch.maximum(low.abs(), high.abs()) / ((largest - smallest) / 2)
    else:
        scale = (high - low) / (largest - smallest)
    if global_scale is not None:
        scale = (scale * global_scale).clamp(max=FP8_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    scale = torch.where(scale == 0, E4M3_EPS if global_scale is not None else FLOAT32_EPS, scale)
    if args.symmetric:
        return scale, torch.zeros(scale.shape, dtype=torch.int32, device=scale.device)
    zero_point = (smallest - low / scale).round().clamp(smallest, largest)
    return scale, zero_point.to(torch.int32)
