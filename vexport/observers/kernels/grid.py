"""Grid search over shrunken ranges, for groups of any size and for whole tensors.

A group is read and widened to float32 once, and all candidates are tried while the group is in the
cache. The error of a candidate is the sum of importance * |q - x|**norm.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import prange

from vexport.numerics import FLOAT32_EPS
from vexport.numerics.arithmetic import (
    Bits,
    Floats,
    as_float,
    as_stored,
    mx_code,
    mx_step,
    nearest,
    power,
    power_6_5,
    power_of_two_below,
    round_to,
    value_range,
    widen,
)
from vexport.numerics.jit import LANES, MULTIPLY_ADD, compiled, wide_vectors
from vexport.numerics.number_formats import E8M0, F32, I32, ROUNDER, NumberFormat

Doubles = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
# Number of bit patterns of a 16-bit value.
BIT_PATTERNS = 1 << 16

# The largest value of a normalized group: scales are then close to 1.
UNIT = 64.0
# Values per task: the minimum for groups, and the maximum for a whole tensor.
TASK_VALUES = 1 << 13
TENSOR_CHUNK = 1 << 16


# Errors of a chunk of this many values are summed in float32, and chunks in float64.
CHUNK = 1024


class Scaling(NamedTuple):
    """Scale, its inverse and the zero point."""

    scale: np.float32
    inverse: np.float32
    zero: np.float32


@compiled(inline=True, fastmath=MULTIPLY_ADD)
def difference(value: np.float32, scaling: Scaling, form: NumberFormat) -> np.float32:
    """Return x - q, exact to float32 if the CPU has a fused multiply-add instruction."""
    scaled = F32(value * scaling.inverse + scaling.zero)
    rounded = round_to(min(max(scaled, form.low), form.high), form)
    return F32(value - F32(rounded - scaling.zero) * scaling.scale)


@compiled(inline=True, fastmath=MULTIPLY_ADD)
def integer_difference(value: np.float32, scaling: Scaling, form: NumberFormat) -> np.float32:
    """Return x - q for integers, in fewer instructions than `difference`.

    Adding 1.5 * 2**23 to a float32 value rounds the value to an integer. Here the zero point is
    added in the same step.
    """
    middle = as_float(I32(ROUNDER + (127 << 23)))
    rounder = F32(middle + scaling.zero)
    rounded = F32(value * scaling.inverse + rounder)
    clamped = min(max(rounded, F32(middle + form.low)), F32(middle + form.high))
    return F32(value - F32(clamped - rounder) * scaling.scale)


@compiled(inline=True, fastmath=LANES)
def add(total: np.float32, term: np.float32) -> np.float32:
    """Add a term to a sum. The compiler may change the order of terms to use vectors."""
    return F32(total + term)


@compiled(inline=True, fastmath=MULTIPLY_ADD)
def chunk_error(
    values: Floats, importance: Floats, scaling: Scaling, form: NumberFormat, norm: np.float32
) -> np.float32:
    """Return sum(importance * |q - x|**norm) of at most CHUNK values.

    The scale should be close to 1.
    """
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
    values: Floats, importance: Floats, scaling: Scaling, form: NumberFormat, norm: np.float32
) -> np.float32:
    """Return `chunk_error`, compiled as a separate function."""
    wide_vectors()
    return chunk_error(values, importance, scaling, form, norm)


@compiled()
def group_error(
    values: Floats,
    importance: Floats,
    scaling: Scaling,
    form: NumberFormat,
    norm: np.float32,
    limit: float,
) -> float:
    """Return sum(importance * |q - x|**norm) of any number of values.

    If a partial sum exceeds `limit`, return this partial sum.
    """
    total = 0.0
    for start in range(0, values.size, CHUNK):
        part = slice(start, min(start + CHUNK, values.size))
        total += float(part_error(values[part], importance[part], scaling, form, norm))
        if total > limit:
            break
    return total


class Candidates(NamedTuple):
    """Scaling of every shrink and a lower bound of its error.

    Each array has shape (shrinks,), padded to whole vectors.
    """

    scales: Floats
    inverses: Floats
    zeros: Floats
    bounds: Floats


class Ends(NamedTuple):
    """Smallest and largest value of a group."""

    low: np.float32
    high: np.float32


@compiled(inline=True)
def scaling_of(low: np.float32, high: np.float32, form: NumberFormat, unit: np.float32) -> Scaling:
    """Return scale and zero point of a range, for values multiplied by `unit`.

    The formulas are those of vexport.observers.qparams.
    """
    low, high = min(low, F32(0.0)), max(high, F32(0.0))
    span = F32(form.high - form.low)
    scale = (
        F32(F32(high - low) / span)
        if form.zero_points
        else F32(max(-low, high) / F32(span / F32(2.0)))
    )
    # The scale is divided by the unit before it is rounded: the storage dtype has a smallest
    # number, so rounding the multiplied scale could give another result.
    if form.scale_storage == E8M0:
        scale = F32(mx_step(mx_code(F32(max(-low, high) / unit), form)) * unit)
    else:
        scale = F32(as_stored(F32(scale / unit), form.scale_storage) * unit)
        scale = F32(F32(FLOAT32_EPS) * unit) if scale == 0 else scale
    zero = min(max(nearest(F32(form.low - F32(low / scale))), form.low), form.high)
    return Scaling(scale, F32(F32(1.0) / scale), zero if form.zero_points else F32(0.0))


@compiled()
def unit_of(low: np.float32, high: np.float32) -> np.float32:
    """Return the power of two that a group is multiplied with.

    The multiplication prevents overflow and underflow and does not change any choice.
    """
    largest = min(max(max(-low, high), F32(2.0**-120)), F32(2.0**120))
    return F32(F32(UNIT) / power_of_two_below(largest))


@compiled()
def multiply(values: Floats, unit: np.float32) -> None:
    """Multiply all values in place."""
    wide_vectors()
    for i in range(values.size):
        values[i] = F32(values[i] * unit)


@compiled()
def weight_of_ends(values: Floats, importance: Floats, ends: Ends) -> np.float32:
    """Return the smaller of two importances: of the group's smallest value, and of its largest."""
    wide_vectors()
    # Positive floats compare like the integers with the same bits. The compiler vectorizes a
    # maximum of integers.
    bits = importance.view(np.int32)
    at_low = at_high = I32(0)
    for i in range(values.size):
        value, weight = values[i], bits[i]
        at_low = max(at_low, weight if value == ends.low else I32(0))
        at_high = max(at_high, weight if value == ends.high else I32(0))
    return as_float(min(at_low, at_high))


@compiled(fastmath=MULTIPLY_ADD)
def prepare(
    ends: Ends,
    unit: np.float32,
    weight: np.float32,
    shrinks: Floats,
    form: NumberFormat,
    norm: np.float32,
    candidates: Candidates,
) -> None:
    """Write the scaling of every shrink of `ends`, and a lower bound of the shrink's error.

    `ends` are multiplied by `unit`. The bound is the error of a single value: of the group's
    smallest or largest value, whichever error is larger. The bound is then reduced a little, so
    that float32 rounding cannot make it too large.
    """
    wide_vectors()
    scales, inverses, zeros, bounds = candidates
    for step in range(shrinks.size):
        scaling = scaling_of(
            F32(ends.low * shrinks[step]), F32(ends.high * shrinks[step]), form, unit
        )
        scales[step], inverses[step], zeros[step] = scaling.scale, scaling.inverse, scaling.zero
        farther = max(
            abs(difference(ends.low, scaling, form)), abs(difference(ends.high, scaling, form))
        )
        bounds[step] = F32(F32(weight * power(farther, norm)) * F32(1.0 - 1e-4))


@compiled(fastmath=MULTIPLY_ADD)
def write_errors(
    values: Floats,
    importance: Floats,
    candidates: Candidates,
    form: NumberFormat,
    norm: np.float32,
    errors: Doubles,
) -> None:
    """Write the error of every candidate, in order.

    A candidate that is worse than an earlier candidate gets a partial error or its lower bound.
    """
    wide_vectors()
    small = values.size <= CHUNK
    least = np.inf
    for step in range(errors.size):
        errors[step] = candidates.bounds[step]
        if errors[step] <= least:
            scaling = Scaling(
                candidates.scales[step], candidates.inverses[step], candidates.zeros[step]
            )
            errors[step] = (
                float(chunk_error(values, importance, scaling, form, norm))
                if small
                else group_error(values, importance, scaling, form, norm, least)
            )
            least = min(least, errors[step])


@compiled()
def first_least(errors: Doubles, improved: Flags) -> int:
    """Return the first step with the smallest error.

    Sets `improved` for every step that was the best so far.
    """
    best, least = 0, np.inf
    for step in range(improved.size):
        if errors[step] < least:
            best, least = step, errors[step]
            improved[step] = True
    return best


@compiled(parallel=True)
def search_groups(
    groups: Bits,
    storage: int,
    importance: Floats,
    expand: np.float32,
    shrinks: Floats,
    form: NumberFormat,
    norm: np.float32,
    lows: Floats,
    highs: Floats,
    steps: Indices,
    improved: Flags,
) -> None:
    """Write the range of every row of `groups`, times `expand`, and the index of its best shrink.

    Row i uses row i of `importance`, modulo the number of these rows. `improved` (tasks, shrinks)
    must be False at first; a flag is set if a step was the best so far for any group. `shrinks` may
    be padded to whole vectors: the additional entries are not searched.
    """
    count, size = groups.shape
    tasks = improved.shape[0]
    # In a small group with little shrinking, the error of a single value is too small to rule out a
    # candidate.
    bounded = size > CHUNK or shrinks[improved.shape[1] - 1] < F32(0.5)
    for task in prange(tasks):
        values = np.empty(size, dtype=F32)
        parts = np.empty((4, shrinks.size), dtype=F32)
        candidates = Candidates(parts[0], parts[1], parts[2], parts[3])
        errors = np.empty(improved.shape[1])
        for group in range(task * count // tasks, (task + 1) * count // tasks):
            widen(values, groups[group], storage)
            low, high = value_range(values)
            low, high = F32(low * expand), F32(high * expand)
            unit = unit_of(low, high)
            multiply(values, unit)
            ends = Ends(F32(low * unit), F32(high * unit))
            weights = importance[group % importance.shape[0]]
            weight = weight_of_ends(values, weights, ends) if bounded else F32(0.0)
            prepare(ends, unit, weight, shrinks, form, norm, candidates)
            write_errors(values, weights, candidates, form, norm, errors)
            steps[group] = first_least(errors, improved[task])
            lows[group], highs[group] = low, high


@compiled(parallel=True)
def group_ranges(groups: Bits, storage: int, tasks: int, lows: Floats, highs: Floats) -> None:
    """Write the range of every row of `groups`."""
    count, size = groups.shape
    for task in prange(tasks):
        values = np.empty(size, dtype=F32)
        for group in range(task * count // tasks, (task + 1) * count // tasks):
            widen(values, groups[group], storage)
            lows[group], highs[group] = value_range(values)


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
def add_counts(values: Bits, counts: Indices) -> None:
    """Count the 16-bit patterns of flat `values` in `counts` (tasks, BIT_PATTERNS), by task."""
    tasks = counts.shape[0]
    for task in prange(tasks):
        row = counts[task]
        for i in range(task * values.size // tasks, (task + 1) * values.size // tasks):
            row[values[i]] += 1
