"""What the packing kernels share: magnitudes, codes of small floats, codes packed into bytes."""

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
    Format,
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
def spread(scales: Floats, wide: int, steps: Floats) -> None:
    """Write the scale of each element into `steps`: every `wide` of them have one, the last ones fewer."""
    for group in range(scales.size):
        steps[group * wide : (group + 1) * wide] = scales[group]


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


@compiled()
def float_code(magnitude: np.float32, form: Format, mantissa_bits: int) -> np.int32:
    """The code, without a sign, of the nearest number of a small float format, ties to the even mantissa.

    `magnitude` is finite, at least 0 and at most `form.high`. Adding the rounder leaves the number of steps
    in the sum's last bits; codes of successive binades are that many steps apart.
    """
    exponent = max(I32(as_bits(magnitude) & I32(EXPONENT_MASK)), form.floor)
    rounder = I32(exponent + form.rounder)
    steps = I32(as_bits(F32(magnitude + as_float(rounder))) - rounder)
    return I32(steps + I32(I32(exponent - form.floor) >> I32(FLOAT32_MANTISSA - mantissa_bits)))


@compiled()
def e2m1_code(value: np.float32, step: np.float32) -> np.uint8:
    """The code of the nearest e2m1 number of a value in units of a positive step; bit 3 is the sign."""
    magnitude = min(abs(F32(value / step)), E2M1.high)
    sign = I32(I32(as_bits(value) >> I32(28)) & I32(8))
    return np.uint8(I32(float_code(magnitude, E2M1, 1) | sign))


@compiled()
def e4m3_code(value: np.float32, step: np.float32) -> np.uint8:
    """The code of the nearest e4m3 number of a value in units of a positive step; bit 7 is the sign."""
    magnitude = min(abs(F32(value / step)), E4M3.high)
    sign = I32(I32(as_bits(value) >> I32(24)) & I32(0x80))
    return np.uint8(I32(float_code(magnitude, E4M3, 3) | sign))


@compiled()
def e2m1_codes(values: Floats, steps: Floats, codes: Bytes) -> None:
    """The e2m1 code of each value in units of its step."""
    wide_vectors()
    for i in range(codes.size):
        codes[i] = e2m1_code(values[i], steps[i])


@compiled()
def e4m3_codes(values: Floats, steps: Floats, codes: Bytes) -> None:
    """The e4m3 code of each value in units of its step."""
    wide_vectors()
    for i in range(codes.size):
        codes[i] = e4m3_code(values[i], steps[i])


@compiled()
def e4m3_value(code: np.uint8) -> np.float32:
    """The number of an e4m3 code without a sign, below 0x7F."""
    if code < 8:
        return F32(F32(code) * F32(2.0**-9))
    return as_float(I32(I32(I32(code) << I32(20)) + I32(120 << 23)))


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
