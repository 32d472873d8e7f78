"""Building blocks of the packing kernels: magnitudes, codes of small floats, codes packed into bytes."""

import numpy as np
import numpy.typing as npt

from vexport.numerics.arithmetic import (
    BFLOAT16,
    E2M1,
    E4M3,
    EXPONENT_MASK,
    F32,
    FLOAT16,
    FLOAT32,
    I32,
    Bits,
    Floats,
    NumberFormat,
    as_bits,
    as_float,
)
from vexport.numerics.jit import compiled, wide_vectors

Bytes = npt.NDArray[np.uint8]

# Values that are widened to float32 at once: with their codes they stay in the first-level cache.
SPAN = 4096
# What is left of a float32, or of a 16-bit float, without its sign: integers in the order of the magnitudes.
MAGNITUDE = 0x7FFFFFFF
HALF_MAGNITUDE = 0x7FFF
HALF_INFINITY = 0x7C00
# float32's mantissa, and how far e4m3's is from its end.
FLOAT32_MANTISSA = 23


@compiled()
def spread(group_scales: Floats, width: int, scales: Floats) -> None:
    """Write the scale of each element into `scales`: every `width` of them have one, the last ones fewer."""
    for group in range(group_scales.size):
        scales[group * width : (group + 1) * width] = group_scales[group]


@compiled()
def largest_magnitude(weight: Bits, storage: int) -> np.float32:
    """The largest absolute value of a stored flat weight; infinite where one is infinite or NaN."""
    wide_vectors()
    mask = I32(MAGNITUDE) if storage == FLOAT32 else I32(HALF_MAGNITUDE)
    most = I32(0)
    for i in range(weight.size):
        most = max(most, I32(I32(weight[i]) & mask))
    return widened_magnitude(most, storage)


@compiled()
def widened_magnitude(bits: np.int32, storage: int) -> np.float32:
    """The value of a stored float without a sign; infinite where it is NaN."""
    if storage == FLOAT16:
        # As in `widen`: 2**112 moves the exponent's bias, for subnormals too.
        finite = F32(as_float(I32(bits << I32(13))) * F32(2.0**112))
        return F32(np.inf) if bits >= HALF_INFINITY else finite
    wide = I32(bits << I32(16)) if storage == BFLOAT16 else bits
    return as_float(min(wide, I32(EXPONENT_MASK)))


@compiled(inline=True)
def float_code(magnitude: np.float32, form: NumberFormat, mantissa_bits: int) -> np.int32:
    """The code, without a sign, of the nearest number of a small float format, ties to the even mantissa.

    `magnitude` is at least 0; beyond `form.high` it saturates. Adding the rounder leaves the number of steps
    in the sum's last bits; codes of successive binades are that many steps apart.
    """
    magnitude = min(magnitude, form.high)
    exponent = max(I32(as_bits(magnitude) & I32(EXPONENT_MASK)), form.floor)
    rounder = I32(exponent + form.rounder)
    steps = I32(as_bits(F32(magnitude + as_float(rounder))) - rounder)
    return I32(steps + I32(I32(exponent - form.floor) >> I32(FLOAT32_MANTISSA - mantissa_bits)))


@compiled()
def e2m1_code(value: np.float32, scale: np.float32) -> np.uint8:
    """The code of the nearest e2m1 number of a value in units of a positive scale; bit 3 is the sign."""
    sign = I32(I32(as_bits(value) >> I32(28)) & I32(8))
    return np.uint8(I32(float_code(abs(F32(value / scale)), E2M1, 1) | sign))


@compiled(inline=True)
def e4m3_magnitude_code(magnitude: np.float32) -> np.int32:
    """The code of the nearest e4m3 number of a value >= 0."""
    return float_code(magnitude, E4M3, 3)


@compiled()
def e4m3_code(value: np.float32, scale: np.float32) -> np.uint8:
    """The code of the nearest e4m3 number of a value in units of a positive scale; bit 7 is the sign."""
    sign = I32(I32(as_bits(value) >> I32(24)) & I32(0x80))
    return np.uint8(I32(e4m3_magnitude_code(abs(F32(value / scale))) | sign))


@compiled()
def e2m1_codes(values: Floats, scales: Floats, codes: Bytes) -> None:
    """The e2m1 code of each value in units of its scale."""
    wide_vectors()
    for i in range(codes.size):
        codes[i] = e2m1_code(values[i], scales[i])


@compiled()
def e4m3_codes(values: Floats, scales: Floats, codes: Bytes) -> None:
    """The e4m3 code of each value in units of its scale."""
    wide_vectors()
    for i in range(codes.size):
        codes[i] = e4m3_code(values[i], scales[i])


@compiled(inline=True)
def e4m3_value(code: np.int32 | np.uint8) -> np.float32:
    """The number of an e4m3 code without a sign, below 0x7F."""
    return F32(as_float(I32(I32(code) << I32(20))) * F32(2.0**120))


@compiled()
def pack_nibbles(codes: Bytes, packed: Bytes) -> None:
    """Two codes below 16 to the byte, the first in the low half; an odd last one is alone."""
    pairs = codes[: codes.size // 2 * 2].view(np.uint16)
    for i in range(pairs.size):
        packed[i] = np.uint8((pairs[i] | (pairs[i] >> np.uint16(4))) & np.uint16(0xFF))
    if codes.size % 2:
        packed[pairs.size] = codes[codes.size - 1]


@compiled()
def pack_bits(codes: Bytes, bits: int, packed: Bytes) -> None:
    """Codes below 2**bits one after the other, low bits first."""
    if bits == 8:
        packed[: codes.size] = codes
    elif bits == 4:
        pack_nibbles(codes, packed)
    else:
        waiting, filled, position = np.uint32(0), np.uint32(0), 0
        for i in range(codes.size):
            waiting = np.uint32(waiting | np.uint32(np.uint32(codes[i]) << filled))
            filled = np.uint32(filled + np.uint32(bits))
            if filled >= 8:
                packed[position] = np.uint8(waiting & np.uint32(0xFF))
                waiting, filled = np.uint32(waiting >> np.uint32(8)), np.uint32(filled - np.uint32(8))
                position += 1
        if filled:
            packed[position] = np.uint8(waiting)
