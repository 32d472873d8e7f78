"""Number formats for float32 arithmetic.

The module does not import numba, because vLLM's CPU build must not load it.
`vexport.numerics.arithmetic` rounds to these formats in compiled kernels, and
`vexport.numerics.tensors` does so in torch.
"""

from typing import NamedTuple

import numpy as np

from vexport.numerics import E2M1_MAX, E4M3_MAX

F32 = np.float32
I32 = np.int32

# Storage codes: numbers that stand for the dtype of weights or scales in compiled kernels. E8M0
# scales are powers of two.
FLOAT32, BFLOAT16, FLOAT16, E8M0 = 0, 1, 2, 3
EXPONENT_MASK = 0x7F800000
# The bits of 1.0 plus ROUNDER are the bits of 1.5 * 2**23. Neighbouring float32 numbers differ by 1
# there, so adding and subtracting this number rounds a value to an integer, ties to even.
ROUNDER = (23 << 23) | 0x400000
# Number of bits of float32's mantissa, and the bit pattern of 2**-127, the smallest MX scale.
FLOAT32_MANTISSA = 23
LEAST_POWER = 1 << 22


class NumberFormat(NamedTuple):
    """Number format that values are rounded to, after division by the scale.

    `low` and `high` are the ends of the range. Adding a number to a value and subtracting it again
    rounds the value. The float32 bits of this number are `max(bits & mask, floor) + rounder`, and
    `bits` are the bits of the value. `mask` selects the exponent. For integers it is 0, because the
    step size is 1 everywhere. Below the exponent `floor`, the step size no longer shrinks.
    `rounder` depends on the number of mantissa bits. `zero_points` is True if a zero point maps the
    ends of a range to `low` and `high`. `scale_storage` is the storage code of the scales' dtype.
    """

    low: np.float32
    high: np.float32
    mask: np.int32
    floor: np.int32
    rounder: np.int32
    zero_points: bool
    scale_storage: int


def integer_format(bits: int) -> NumberFormat:
    """Return the format of signed integers with this number of bits, without zero points."""
    high = 2 ** (bits - 1) - 1
    return NumberFormat(
        F32(-high - 1), F32(high), I32(0), I32(127 << 23), I32(ROUNDER), False, FLOAT32
    )


def float_format(largest: float, smallest_exponent: int, mantissa_bits: int) -> NumberFormat:
    """Return a float format with subnormals below 2**smallest_exponent.

    Values beyond `largest` saturate.
    """
    floor = (127 + smallest_exponent) << 23
    rounder = ROUNDER - (mantissa_bits << 23)
    return NumberFormat(
        F32(-largest), F32(largest), I32(EXPONENT_MASK), I32(floor), I32(rounder), False, FLOAT32
    )


E4M3 = float_format(E4M3_MAX, -6, 3)
E2M1 = float_format(E2M1_MAX, 0, 1)
