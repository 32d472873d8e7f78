"""The grid search over shrunken ranges, for groups, channels, blocks and whole tensors.

One pass over the weight: a group is widened to float32 once, and all candidates are tried while it is in the
cache. Every candidate is tried for every group, so that the error is never above that of a search that stops
after some steps without improvement.
"""

import numpy as np
import numpy.typing as npt
from numba import prange

from vexport.observers.kernels.arithmetic import (
    CHUNK,
    F32,
    Bits,
    Floats,
    Format,
    chunk_error,
    compiled,
    value_range,
    widen,
)

Doubles = npt.NDArray[np.float64]

# Below this a scale has no float32 inverse: the group is searched in a larger unit, which changes no choice.
TINY = 2.0**-96
TINY_UNIT = 2.0**64
# What a zero scale becomes (FLOAT32_EPS of vexport.observers.qparams).
ZERO_SCALE = F32(2.0**-23)
# Values of a whole-tensor search that one thread takes at a time.
TENSOR_CHUNK = 1 << 16


@compiled()
def scale_and_zero(low: np.float32, high: np.float32, form: Format) -> tuple[np.float32, np.float32]:
    """The scale and zero point of a range (formulas of vexport.observers.qparams)."""
    low, high = min(low, F32(0.0)), max(high, F32(0.0))
    span = F32(form.high - form.low)
    if not form.zero_points:
        scale = F32(max(-low, high) / F32(span / F32(2.0)))
        return (ZERO_SCALE if scale == 0 else scale), F32(0.0)
    scale = F32(F32(high - low) / span)
    scale = ZERO_SCALE if scale == 0 else scale
    zero = F32(np.rint(F32(form.low - F32(low / scale))))
    return scale, min(max(zero, form.low), form.high)


@compiled()
def group_error(
    values: Floats, importance: Floats, inverse: np.float32, zero: np.float32, form: Format, norm: np.float32
) -> float:
    """sum(importance * |q - x|**norm) of any number of values, in units of the scale 1 / inverse."""
    if values.size <= CHUNK:
        return float(chunk_error(values, importance, inverse, zero, form, norm))
    total = 0.0
    for start in range(0, values.size, CHUNK):
        part = slice(start, min(start + CHUNK, values.size))
        total += float(chunk_error(values[part], importance[part], inverse, zero, form, norm))
    return total


@compiled()
def set_candidates(
    low: np.float32,
    high: np.float32,
    shrinks: Floats,
    tangents: Doubles,
    form: Format,
    inverses: Floats,
    zeros: Floats,
    units: Doubles,
) -> None:
    """Write 1 / scale, zero point and the unit of the error for every shrink of a range.

    Errors are compared in units of whole**norm. A candidate's scale / whole is its shrink but for a rounding,
    so its power is on the tangent of r**norm at the shrink: tangents[0] + tangents[1] * (scale / whole).
    """
    whole = 1.0 / float(scale_and_zero(low, high, form)[0])
    for step in range(shrinks.size):
        scale, zero = scale_and_zero(F32(low * shrinks[step]), F32(high * shrinks[step]), form)
        inverses[step], zeros[step] = F32(F32(1.0) / scale), zero
        units[step] = tangents[0, step] + tangents[1, step] * (float(scale) * whole)


@compiled()
def tiny_unit(low: np.float32, high: np.float32) -> np.float32:
    """What to multiply a group with so that its scales have inverses: 1 but for tiny groups."""
    largest = max(-low, high)
    return F32(TINY_UNIT) if F32(0.0) < largest < F32(TINY) else F32(1.0)


@compiled(parallel=True)
def search_blocks(
    weight: Bits,
    storage: int,
    importance: Floats,
    block: tuple[int, int],
    shrinks: Floats,
    tangents: Doubles,
    form: Format,
    norm: np.float32,
    lows: Floats,
    highs: Floats,
) -> None:
    """Write the best range of every block (ragged at the bottom and right) of `weight` (rows, columns).

    `importance` is per column, `tangents` are of r**norm at the shrinks. `lows` and `highs` have
    the shape of the grid of blocks.
    """
    rows, columns = weight.shape
    for down in prange(lows.shape[0]):
        top, bottom = down * block[0], min((down + 1) * block[0], rows)
        buffer = np.empty((bottom - top) * min(block[1], columns), dtype=F32)
        column_weights = np.empty(buffer.size, dtype=F32)
        inverses, zeros = np.empty(shrinks.size, dtype=F32), np.empty(shrinks.size, dtype=F32)
        units, errors = np.empty(shrinks.size), np.empty(shrinks.size)
        for across in range(lows.shape[1]):
            left, right = across * block[1], min((across + 1) * block[1], columns)
            width = right - left
            size = (bottom - top) * width
            for row in range(bottom - top):
                part = slice(row * width, (row + 1) * width)
                widen(buffer[part], weight[top + row, left:right], storage)
                column_weights[part] = importance[left:right]
            values, weights = buffer[:size], column_weights[:size]
            low, high = value_range(values)
            unit = tiny_unit(low, high)
            if unit != F32(1.0):
                values *= unit
            set_candidates(F32(low * unit), F32(high * unit), shrinks, tangents, form, inverses, zeros, units)
            for step in range(shrinks.size):
                error = group_error(values, weights, inverses[step], zeros[step], form, norm)
                errors[step] = units[step] * error
            best = shrinks[errors.argmin()]
            lows[down, across] = F32(low * best)
            highs[down, across] = F32(high * best)


@compiled(parallel=True)
def tensor_ranges(weight: Bits, storage: int, lows: Floats, highs: Floats) -> None:
    """Write the range of every TENSOR_CHUNK values of a flat weight."""
    for chunk in prange(lows.size):
        start = chunk * TENSOR_CHUNK
        part = weight[start : min(start + TENSOR_CHUNK, weight.size)]
        values = np.empty(part.size, dtype=F32)
        widen(values, part, storage)
        lows[chunk], highs[chunk] = value_range(values)


@compiled(parallel=True)
def tensor_errors(
    weight: Bits,
    storage: int,
    unit: np.float32,
    inverses: Floats,
    zeros: Floats,
    form: Format,
    norm: np.float32,
    errors: Doubles,
) -> None:
    """Write the error of every TENSOR_CHUNK values of a flat weight for every candidate."""
    for chunk in prange(errors.shape[0]):
        start = chunk * TENSOR_CHUNK
        part = weight[start : min(start + TENSOR_CHUNK, weight.size)]
        values = np.empty(part.size, dtype=F32)
        widen(values, part, storage)
        values *= unit
        ones = np.ones(part.size, dtype=F32)
        for step in range(inverses.size):
            errors[chunk, step] = group_error(values, ones, inverses[step], zeros[step], form, norm)
