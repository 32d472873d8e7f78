"""Arithmetic of number formats in torch, for tensors on any device.

Results are bit-identical to those of the kernels in `vexport.numerics.arithmetic`. vLLM's process
rounds activations with this module. It therefore imports no numba, and torch.compile supports all
of its functions.
"""

from typing import NamedTuple

import torch

from vexport.numerics import E8M0_BIAS, MX_ROUND_UP, number_formats
from vexport.numerics.number_formats import (
    EXPONENT_MASK,
    FLOAT32_MANTISSA,
    LEAST_POWER,
    NumberFormat,
)


class TensorFormat(NamedTuple):
    """`NumberFormat` with Python numbers, which are constants for torch.compile.

    `exponent` is the exponent of the largest power of two in the format.
    """

    low: float
    high: float
    mask: int
    floor: int
    rounder: int
    exponent: int

    @classmethod
    def of(cls, form: NumberFormat) -> "TensorFormat":
        """Return the same format for tensors."""
        return cls(
            low=float(form.low),
            high=float(form.high),
            mask=int(form.mask),
            floor=int(form.floor),
            rounder=int(form.rounder),
            exponent=(int(form.high.view("int32")) >> FLOAT32_MANTISSA) - E8M0_BIAS,
        )


E2M1 = TensorFormat.of(number_formats.E2M1)
E4M3 = TensorFormat.of(number_formats.E4M3)


def round_to(values: torch.Tensor, form: TensorFormat) -> torch.Tensor:
    """Round each float32 value to the nearest number of a format, ties to the even mantissa.

    Values outside of the format's range saturate, NaN stays NaN, and zero has no sign.
    """
    within = values.clamp(form.low, form.high)
    exponent = (within.view(torch.int32) & form.mask).clamp_(min=form.floor)
    rounder = exponent.add_(form.rounder).view(torch.float32)
    return (within + rounder).sub_(rounder)


def mx_scale(largest: torch.Tensor, form: TensorFormat) -> torch.Tensor:
    """Return the scale of each group in an MX format, given the group's largest magnitude.

    The scales are powers of two. Input and result are float32. If a magnitude is not finite, its
    scale is infinity, which is stored as E8M0's NaN.
    """
    bits = largest.view(torch.int32)
    code = ((bits + MX_ROUND_UP) >> FLOAT32_MANTISSA) - form.exponent
    scale = (code << FLOAT32_MANTISSA).clamp_(min=LEAST_POWER)
    return torch.where(bits < EXPONENT_MASK, scale, EXPONENT_MASK).view(torch.float32)
