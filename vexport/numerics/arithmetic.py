"""Float32 building blocks of the kernels: widening, rounding, codes in bytes, powers and scales.

Loops over values have no branches, so that the compiler can vectorize them. Only `pack_bits` needs
branches. Results are deterministic and do not depend on the number of threads. The flag `contract`
only allows fused multiply-add instructions. The flag `reassoc` only allows a sum to be split into
vector lanes.
"""

import numpy as np
import numpy.typing as npt

from vexport.numerics import (
    E4M3_MAX,
    E8M0_BIAS,
    E8M0_NAN,
    FLOAT32_EPS,
    GLOBAL_SCALE_NUMERATOR,
    MX_ROUND_UP,
)
from vexport.numerics.jit import MULTIPLY_ADD, compiled, wide_vectors
from vexport.numerics.number_formats import (
    BFLOAT16,
    E2M1,
    E4M3,
    EXPONENT_MASK,
    F32,
    FLOAT16,
    FLOAT32,
    FLOAT32_MANTISSA,
    I32,
    LEAST_POWER,
    ROUNDER,
    NumberFormat,
)

Bits = npt.NDArray[np.int32] | npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

# Number of values that are widened to float32 at a time. With their codes, they fit into the
# first-level cache.
SPAN = 4096
# Masks that remove the sign bit of a float32 or of a 16-bit float. The remaining bits, read as
# integers, have the same order as the magnitudes.
MAGNITUDE = 0x7FFFFFFF
HALF_MAGNITUDE = 0x7FFF
# Bits of infinity in float16.
HALF_INFINITY = 0x7C00


@compiled(inline=True)
def as_float(bits: np.int32) -> np.float32:
    """Return the float32 with these bits."""
    return I32(bits).view(F32)


@compiled(inline=True)
def as_bits(value: np.float32) -> np.int32:
    """Return the bits of a float32."""
    return F32(value).view(I32)


@compiled()
def widen(target: Floats, source: Bits, storage: int) -> None:
    """Write the exact float32 values of stored bits into `target`; both have the same length."""
    wide_vectors()
    bits = target.view(np.int32)
    if storage == FLOAT32:
        for i in range(source.size):
            bits[i] = I32(source[i])
    elif storage == BFLOAT16:
        for i in range(source.size):
            bits[i] = I32(I32(source[i]) << I32(16))
    else:
        for i in range(source.size):
            half = I32(source[i])
            magnitude = I32(I32(half & I32(0x7FFF)) << I32(13))
            # 2**112 changes the exponent's bias from 15 to 127, also for subnormals.
            finite = as_bits(as_float(magnitude) * F32(2.0**112))
            wide = I32(finite | I32(EXPONENT_MASK)) if magnitude >= I32(0x0F800000) else finite
            bits[i] = I32(wide | I32(I32(half & I32(0x8000)) << I32(16)))


@compiled(inline=True)
def ordered(bits: np.int32) -> np.int32:
    """Map float32 bits to integers with the same order as the numbers, or map them back.

    NaNs become the largest and the smallest integers.
    """
    return I32(bits ^ (I32(bits >> I32(31)) & I32(0x7FFFFFFF)))


@compiled()
def value_range(values: Floats) -> tuple[np.float32, np.float32]:
    """Return the smallest and the largest value. If a value is NaN, at least one result is NaN."""
    wide_vectors()
    bits = values.view(np.int32)
    low = high = ordered(bits[0])
    for i in range(values.size):
        key = ordered(bits[i])
        low = min(low, key)
        high = max(high, key)
    return as_float(ordered(low)), as_float(ordered(high))


@compiled(inline=True)
def nearest(value: np.float32) -> np.float32:
    """Return the nearest integer, ties to even, of a value within 2**22.

    Unlike np.rint, this compiles to arithmetic instead of a call.
    """
    rounder = as_float(I32(ROUNDER + (127 << 23)))
    return F32(F32(value + rounder) - rounder)


@compiled(inline=True)
def rounder_of(value: np.float32, form: NumberFormat) -> np.int32:
    """Return the bits of the rounder of a value.

    Adding the rounder to the value and subtracting it again rounds the value to the format's
    precision.
    """
    return I32(max(I32(as_bits(value) & form.mask), form.floor) + form.rounder)


@compiled(inline=True)
def round_to(value: np.float32, form: NumberFormat) -> np.float32:
    """Return the nearest number of a format, ties to the even mantissa.

    The value must be within the range of the format. Zero has no sign.
    `vexport.numerics.tensors.round_to` is the same function in torch.
    """
    rounder = as_float(rounder_of(value, form))
    return F32(F32(value + rounder) - rounder)


@compiled()
def round_values(values: Floats, form: NumberFormat) -> None:
    """Round values in place to the nearest number of a format, with saturation."""
    wide_vectors()
    for i in range(values.size):
        values[i] = round_to(min(max(values[i], form.low), form.high), form)


@compiled()
def power_of_two_below(value: np.float32) -> np.float32:
    """Return the largest power of two that is not above a positive normal value."""
    return as_float(as_bits(value) & I32(EXPONENT_MASK))


@compiled(inline=True)
def as_stored(scale: np.float32, storage: int) -> np.float32:
    """Round a positive scale to the dtype in which it is stored."""
    bits = as_bits(scale)
    if storage == BFLOAT16:
        half = I32(I32(0x7FFF) + I32(I32(bits >> I32(16)) & I32(1)))
        return as_float(I32(I32(bits + half) & I32(-65536)))
    if storage == FLOAT16:
        # float16 has 10 bits of mantissa, and its smallest exponent is -14 (113 - 127).
        rounder = as_float(I32(max(I32(bits & I32(EXPONENT_MASK)), I32(113 << 23)) + I32(13 << 23)))
        rounded = F32(F32(scale + rounder) - rounder)
        return rounded if rounded < F32(65520.0) else F32(np.inf)
    return scale


@compiled(inline=True, fastmath=MULTIPLY_ADD)
def power_6_5(x: np.float32) -> np.float32:
    """Return x**1.2, so |d|**2.4 for x = d * d, for 0 <= x < 2**40; relative error below 6e-7.

    First, y approximates x**-0.2 with an error of at most 3.5 %, computed from the bits of x. Then
    x**1.2 = (x * y**3) * (x * y) * (x * y**5)**-0.8. The last factor is close to 1 and computed
    with a minimax polynomial.
    """
    y = as_float(I32(F32(as_bits(x)) * F32(-0.2) + F32(1277905000.0)))
    y2 = F32(y * y)
    xy = F32(x * y)
    xy3 = F32(xy * y2)
    e = F32(xy3 * y2 - F32(1.0))
    p = F32(e * F32(-0.6357398629188538) + F32(0.660181999206543))
    p = F32(e * p + F32(-0.6717605590820312))
    p = F32(e * p + F32(0.7198033928871155))
    p = F32(e * p + F32(-0.8000005483627319))
    p = F32(e * p + F32(1.000000238418579))
    return F32(F32(xy3 * xy) * p)


@compiled(inline=True, fastmath=MULTIPLY_ADD)
def power(x: np.float32, exponent: np.float32) -> np.float32:
    """Return x**exponent for x >= 0, as exp2(exponent * log2(x)) with minimax polynomials.

    For x = 0, log2(x) is -127. Results are limited to the range from 2**-126 to 2**127. Within this
    range, the relative error is below 2e-7 * (1 + |exponent * log2(x)|).
    """
    bits = as_bits(x)
    whole = I32(I32(bits - I32(0x3F3504F3)) >> I32(23))
    m = F32(as_float(bits - I32(whole << I32(23))) - F32(1.0))
    p = F32(m * F32(0.1254276796979766) + F32(-0.21028976330564148))
    p = F32(m * p + F32(0.21736580414543036))
    p = F32(m * p + F32(-0.23852119025448984))
    p = F32(m * p + F32(0.287658750081982))
    p = F32(m * p + F32(-0.36072113694036634))
    p = F32(m * p + F32(0.4809224228490148))
    p = F32(m * p + F32(-0.7213471289212208))
    p = F32(m * p + F32(1.4426948701197804))
    log = F32(exponent * F32(m * p + F32(whole)))
    log = min(max(log, F32(-126.0)), F32(127.0))
    near = nearest(log)
    f = F32(log - near)
    q = F32(f * F32(0.001327647173643221) + F32(0.009675541540193578))
    q = F32(f * q + F32(0.055507132760972626))
    q = F32(f * q + F32(0.2402211972007268))
    q = F32(f * q + F32(0.6931469670620369))
    q = F32(f * q + F32(1.000000071655433))
    return as_float(as_bits(q) + I32(I32(near) << I32(23)))


@compiled()
def spread(group_scales: Floats, width: int, scales: Floats) -> None:
    """Write the scale of each element into `scales`.

    Every `width` elements share a group's scale. The last group may be smaller.
    """
    for group in range(group_scales.size):
        scales[group * width : (group + 1) * width] = group_scales[group]


@compiled()
def largest_magnitude(weight: Bits, storage: int) -> np.float32:
    """Return the largest absolute value of a stored flat weight.

    Returns infinity if a value is not finite.
    """
    wide_vectors()
    mask = I32(MAGNITUDE) if storage == FLOAT32 else I32(HALF_MAGNITUDE)
    most = I32(0)
    for i in range(weight.size):
        most = max(most, I32(I32(weight[i]) & mask))
    return widened_magnitude(most, storage)


@compiled()
def widened_magnitude(bits: np.int32, storage: int) -> np.float32:
    """Return the value of a stored float without a sign; infinity if it is NaN."""
    if storage == FLOAT16:
        # As in `widen`: 2**112 changes the exponent's bias, also for subnormals.
        finite = F32(as_float(I32(bits << I32(13))) * F32(2.0**112))
        return F32(np.inf) if bits >= HALF_INFINITY else finite
    wide = I32(bits << I32(16)) if storage == BFLOAT16 else bits
    return as_float(min(wide, I32(EXPONENT_MASK)))


@compiled(inline=True)
def float_code(magnitude: np.float32, form: NumberFormat, mantissa_bits: int) -> np.int32:
    """Round a magnitude to a small float format and return its code without the sign bit.

    `magnitude` is at least 0. A magnitude above `form.high` saturates. The code is the sum of two
    numbers:

    - The rounded value divided by the step size of its binade. The last bits of
      `magnitude + rounder` contain this number.
    - The number of the binade times 2**mantissa_bits. The smallest normal binade has the number 0.
    """
    magnitude = min(magnitude, form.high)
    rounder = rounder_of(magnitude, form)
    steps = I32(as_bits(F32(magnitude + as_float(rounder))) - rounder)
    exponent = I32(rounder - form.rounder)
    return I32(steps + I32(I32(exponent - form.floor) >> I32(FLOAT32_MANTISSA - mantissa_bits)))


@compiled(inline=True)
def mx_code(largest: np.float32, form: NumberFormat) -> np.int32:
    """Return the scale that an MX format stores for a group: an exponent with a bias of 127.

    `largest` is the group's largest magnitude. It is rounded down to a power of two, or up if it is
    at least 1.75 times this power. The scale is the result divided by the format's largest power of
    two. The code is 255 if the magnitude is not finite.
    `vexport.numerics.tensors.mx_scale` is the same function in torch. Source: generate_mx_scales
    and round_to_power_2 in compressed_tensors/quantization/utils/mxfp_utils.py.
    """
    bits = as_bits(largest)
    lowered = I32(I32(as_bits(form.high) >> I32(FLOAT32_MANTISSA)) - I32(E8M0_BIAS))
    code = I32(I32(I32(bits + I32(MX_ROUND_UP)) >> I32(FLOAT32_MANTISSA)) - lowered)
    is_finite = bits < I32(EXPONENT_MASK)
    return max(code, I32(0)) if is_finite else I32(E8M0_NAN)


@compiled(inline=True)
def mx_step(code: np.int32) -> np.float32:
    """Return the power of two for the code of an MX scale.

    The smallest, 2**-127, is a subnormal number. The code 255 returns infinity.
    """
    return as_float(max(I32(I32(code) << I32(FLOAT32_MANTISSA)), I32(LEAST_POWER)))


@compiled()
def e2m1_code(value: np.float32, scale: np.float32) -> np.uint8:
    """Return the code of the e2m1 number nearest to `value / scale`; bit 3 is the sign.

    `scale` must be positive.
    """
    sign = I32(I32(as_bits(value) >> I32(28)) & I32(8))
    return np.uint8(I32(float_code(abs(F32(value / scale)), E2M1, 1) | sign))


@compiled(inline=True)
def e4m3_magnitude_code(magnitude: np.float32) -> np.int32:
    """Return the code of the e4m3 number nearest to a value >= 0."""
    return float_code(magnitude, E4M3, 3)


@compiled()
def e4m3_code(value: np.float32, scale: np.float32) -> np.uint8:
    """Return the code of the e4m3 number nearest to `value / scale`; bit 7 is the sign.

    `scale` must be positive.
    """
    sign = I32(I32(as_bits(value) >> I32(24)) & I32(0x80))
    return np.uint8(I32(e4m3_magnitude_code(abs(F32(value / scale))) | sign))


@compiled()
def e2m1_codes(values: Floats, scales: Floats, codes: Bytes) -> None:
    """Write the e2m1 code of each value divided by its scale."""
    wide_vectors()
    for i in range(codes.size):
        codes[i] = e2m1_code(values[i], scales[i])


@compiled()
def e4m3_codes(values: Floats, scales: Floats, codes: Bytes) -> None:
    """Write the e4m3 code of each value divided by its scale."""
    wide_vectors()
    for i in range(codes.size):
        codes[i] = e4m3_code(values[i], scales[i])


@compiled(inline=True)
def e4m3_value(code: np.int32 | np.uint8) -> np.float32:
    """Return the value of an e4m3 code without a sign, below 0x7F."""
    return F32(as_float(I32(I32(code) << I32(20))) * F32(2.0**120))


@compiled()
def pack_nibbles(codes: Bytes, packed: Bytes) -> None:
    """Pack codes below 16 into bytes, two per byte, the first in the low half.

    If the number of codes is odd, the last byte contains a single code.
    """
    pairs = codes[: codes.size // 2 * 2].view(np.uint16)
    for i in range(pairs.size):
        packed[i] = np.uint8((pairs[i] | (pairs[i] >> np.uint16(4))) & np.uint16(0xFF))
    if codes.size % 2:
        packed[pairs.size] = codes[codes.size - 1]


@compiled()
def pack_bits(codes: Bytes, bits: int, packed: Bytes) -> None:
    """Pack codes below 2**bits into a stream of bits, low bits first."""
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
                waiting, filled = (
                    np.uint32(waiting >> np.uint32(8)),
                    np.uint32(filled - np.uint32(8)),
                )
                position += 1
        if filled:
            packed[position] = np.uint8(waiting)


def global_scale_of(largest: np.float32) -> Floats:
    """Return the global scale 448 * 6 / largest: float32, shape (1,).

    Returns 1 if this is not finite, for example if `largest` is zero.
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # Compute the reciprocal first, as torch does when it divides a number by a tensor.
        scale = np.float32(GLOBAL_SCALE_NUMERATOR) * (np.float32(1.0) / np.float32(largest))
    return np.array([scale if np.isfinite(scale) else 1.0], np.float32)


def fp8_scale_of(largest: np.float32) -> Floats:
    """Return largest / 448: float32, shape (1,).

    If the result would be zero, return 2**-23, the distance from 1 to the next float32 number.
    """
    scale = np.float32(largest) / np.float32(E4M3_MAX)
    return np.array([scale if scale else FLOAT32_EPS], np.float32)
