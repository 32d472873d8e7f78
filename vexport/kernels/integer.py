"""Integers with one scale for a run of columns: INT8 as it is, 2 to 8 bits packed into a stream of bits."""

from typing import NamedTuple

import numpy as np

from vexport.numerics.arithmetic import (
    F32,
    I32,
    Bits,
    Floats,
    as_stored,
    value_range,
    widen,
)
from vexport.numerics.codes import Bytes, largest_magnitude, pack_bits, spread
from vexport.numerics.constants import FLOAT32_EPS
from vexport.numerics.jit import compiled, wide_vectors


class Integers(NamedTuple):
    """How values become integers of `bits` bits.

    `base` is the integer whose code is zero: the smallest one, or 0 where codes are two's complement.
    `symmetric` is without zero points; `scale_storage` is the dtype that scales are rounded to first.
    """

    bits: int
    base: int
    symmetric: bool
    scale_storage: int


@compiled()
def symmetric_scale(group: Bits, storage: int, bits: int) -> np.float32:
    """The min-max scale of a group; infinite where a value is not finite."""
    scale = F32(largest_magnitude(group, storage) / F32(F32(2**bits - 1) / F32(2.0)))
    return scale if scale else F32(FLOAT32_EPS)


@compiled()
def scale_and_zero(group: Bits, storage: int, bits: int, values: Floats) -> tuple[np.float32, np.float32]:
    """Min-max scale and zero point of a group; infinite where a value is not finite."""
    widen(values[: group.size], group, storage)
    low, high = value_range(values[: group.size])
    if np.isnan(low) or np.isnan(high):
        return F32(np.inf), F32(0.0)
    low, high = min(low, F32(0.0)), max(high, F32(0.0))
    smallest = F32(-(2 ** (bits - 1)))
    scale = F32(F32(high - low) / F32(2**bits - 1))
    scale = scale if scale else F32(FLOAT32_EPS)
    zero = F32(np.rint(F32(smallest - F32(low / scale))))
    return scale, min(max(zero, smallest), F32(-smallest - F32(1.0)))


@compiled()
def find_scales(
    row: Bits, storage: int, form: Integers, scales: Floats, zeros: Floats, values: Floats
) -> None:
    """Min-max scales and zero points of a row's groups."""
    wide = row.size // max(1, scales.size)
    for group in range(scales.size):
        part = row[group * wide : (group + 1) * wide]
        if form.symmetric:
            scales[group], zeros[group] = symmetric_scale(part, storage, form.bits), F32(0.0)
        else:
            scales[group], zeros[group] = scale_and_zero(part, storage, form.bits, values)


@compiled()
def quantize(values: Floats, steps: Floats, zeros: Floats, form: Integers, codes: Bytes) -> None:
    """The code of each value in units of its step; a step of zero makes it the code of zero."""
    wide_vectors()
    smallest = F32(-(2 ** (form.bits - 1)))
    largest = F32(-smallest - F32(1.0))
    for i in range(codes.size):
        step = steps[i] if steps[i] > 0 else F32(np.inf)
        scaled = F32(F32(values[i] / step) + zeros[i])
        codes[i] = np.uint8(I32(I32(np.rint(min(max(scaled, smallest), largest))) - I32(form.base)))


@compiled()
def pack(
    weight: Bits, storage: int, form: Integers, scales: Floats, zeros: Floats, given: bool, packed: Bytes
) -> None:
    """Quantize a weight (rows, columns) in groups of columns and write each row's codes into `packed`.

    `scales` and `zeros` (rows, groups) are used where `given`, else made here; scales are rounded as they
    are stored, and infinite where a value is not finite. `packed` (rows, bytes) must be zero beyond the
    last code.
    """
    rows, columns = weight.shape
    wide = columns // max(1, scales.shape[1])
    values, codes = np.empty(columns, F32), np.empty(columns, np.uint8)
    steps, shifts = np.empty(columns, F32), np.empty(columns, F32)
    for row in range(rows):
        if not given:
            find_scales(weight[row], storage, form, scales[row], zeros[row], values)
        for group in range(scales.shape[1]):
            scales[row, group] = as_stored(scales[row, group], form.scale_storage)
        spread(scales[row], wide, steps)
        spread(zeros[row], wide, shifts)
        widen(values, weight[row], storage)
        quantize(values, steps, shifts, form, codes)
        pack_bits(codes, form.bits, packed[row])
