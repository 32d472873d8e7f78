"""Rounding to the values that a format can represent."""

import torch

from vexport.numerics.constants import E2M1_MAX
from vexport.observers.args import ObserverArgs, is_float
from vexport.observers.qparams import quantized_range


def round_to_format(scaled: torch.Tensor, args: ObserverArgs) -> torch.Tensor:
    """The nearest representable value of each element, same dtype; what is out of range saturates."""
    smallest, largest = quantized_range(args)
    clamped = scaled.clamp(smallest, largest)
    if not is_float(args):
        return clamped.round_()
    if args.num_bits == 4:
        return round_to_e2m1(clamped)
    return clamped.to(torch.float8_e4m3fn).to(scaled.dtype)


def round_to_e2m1(value: torch.Tensor) -> torch.Tensor:
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even mantissa.

    The steps between them are 0.5 below 2, 1 below 4 and 2 above; beyond 6 values saturate.
    """
    magnitude = value.abs()
    step = torch.full_like(magnitude, 0.5).masked_fill_(magnitude >= 2, 1.0).masked_fill_(magnitude >= 4, 2.0)
    return value.div(step).round_().mul_(step).clamp_(-E2M1_MAX, E2M1_MAX)


def fake_quantize(
    value: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, args: ObserverArgs
) -> torch.Tensor:
    """Quantize and dequantize; `scale` and `zero_point` broadcast to `value`, all of one float dtype.

    Source of the order of operations: _quantize_dequantize in
    compressed_tensors/quantization/lifecycle/forward_helpers.py.
    """
    if args.symmetric:
        return round_to_format(value / scale, args).mul_(scale)
    return round_to_format((value / scale).add_(zero_point), args).sub_(zero_point).mul_(scale)
