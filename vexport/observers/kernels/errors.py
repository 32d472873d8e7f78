"""Errors of values that are rounded to a format: sums of importance * |q - x|**norm."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vexport.numerics.arithmetic import (
    F32,
    I32,
    ROUNDER,
    Floats,
    Format,
    as_float,
    power,
    power_6_5,
    round_to,
)
from vexport.numerics.jit import LANES, MULTIPLY_ADD, compiled, wide_vectors

Doubles = npt.NDArray[np.float64]

# Errors are added up in float32 over this many values, in float64 beyond.
CHUNK = 1024


class Scaling(NamedTuple):
    """A scale, its inverse and its zero point."""

    scale: np.float32
    inverse: np.float32
    zero: np.float32


@compiled(inline=True, fastmath=MULTIPLY_ADD)
def difference(value: np.float32, scaling: Scaling, form: Format) -> np.float32:
    """x - q, exact to float32 where a multiply-add is one instruction."""
    scaled = F32(value * scaling.inverse + scaling.zero)
    rounded = round_to(min(max(scaled, form.low), form.high), form)
    return F32(value - F32(rounded - scaling.zero) * scaling.scale)


@compiled(inline=True, fastmath=MULTIPLY_ADD)
def integer_difference(value: np.float32, scaling: Scaling, form: Format) -> np.float32:
    """The same for integers, in fewer instructions: the number whose addition rounds holds the zero point."""
    middle = as_float(I32(ROUNDER + (127 << 23)))
    rounder = F32(middle + scaling.zero)
    rounded = F32(value * scaling.inverse + rounder)
    clamped = min(max(rounded, F32(middle + form.low)), F32(middle + form.high))
    return F32(value - F32(clamped - rounder) * scaling.scale)


@compiled(inline=True, fastmath=LANES)
def add(total: np.float32, term: np.float32) -> np.float32:
    """A sum whose terms may be added in lanes."""
    return F32(total + term)


@compiled(inline=True, fastmath=MULTIPLY_ADD)
def chunk_error(
    values: Floats, importance: Floats, scaling: Scaling, form: Format, norm: np.float32
) -> np.float32:
    """sum(importance * |q - x|**norm) of at most CHUNK values; the scale should not be far from one."""
    wide_vectors()
    total = F32(0.0)
    if norm == F32(2.4) and form.mask == 0:
        for i in range(values.size):
            d = integer_difference(values[i], scaling, form)
            total = add(total, F32(importance[i] * power_6_5(F32(d * d))))
    elif norm == F32(2.4):
        for i in range(values.size):
            d = difference(values[i], scaling, form)
            total = add(total, F32(importance[i] * power_6_5(F32(d * d))))
    elif norm == F32(3.0) and form.mask == 0:
        for i in range(values.size):
            d = abs(integer_difference(values[i], scaling, form))
            total = add(total, F32(importance[i] * F32(F32(d * d) * d)))
    elif norm == F32(3.0):
        for i in range(values.size):
            d = abs(difference(values[i], scaling, form))
            total = add(total, F32(importance[i] * F32(F32(d * d) * d)))
    else:
        for i in range(values.size):
            d = abs(difference(values[i], scaling, form))
            total = add(total, F32(importance[i] * power(d, norm)))
    return total


@compiled(fastmath=MULTIPLY_ADD)
def part_error(
    values: Floats, importance: Floats, scaling: Scaling, form: Format, norm: np.float32
) -> np.float32:
    """`chunk_error` as a separate call."""
    wide_vectors()
    return chunk_error(values, importance, scaling, form, norm)


@compiled()
def group_error(
    values: Floats, importance: Floats, scaling: Scaling, form: Format, norm: np.float32, limit: float
) -> float:
    """sum(importance * |q - x|**norm) of any number of values; a part of it once that is above `limit`."""
    total = 0.0
    for start in range(0, values.size, CHUNK):
        part = slice(start, min(start + CHUNK, values.size))
        total += float(part_error(values[part], importance[part], scaling, form, norm))
        if total > limit:
            break
    return total
