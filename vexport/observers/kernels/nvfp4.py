"""Search over NVFP4 block scales that tries only the few scales that can be stored.

A block scale is stored as an e4m3 value relative to the global scale. So only the e4m3 values
between the scales of the largest and of the smallest candidate range have to be tried. Groups are
small, so each vector lane processes a group: values are transposed to (size, groups).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import prange

from vexport.numerics import E4M3_EPS_CODE
from vexport.numerics.arithmetic import (
    Bits,
    Bytes,
    Floats,
    e4m3_magnitude_code,
    e4m3_value,
    power,
    power_6_5,
    power_of_two_below,
    round_to,
    widen,
)
from vexport.numerics.jit import MULTIPLY_ADD, compiled, wide_vectors
from vexport.numerics.number_formats import E2M1, F32, I32

Integers = npt.NDArray[np.int32]

# Maximum number of groups searched together. The search stops when none of them can improve.
LANES = 128


class NVFP4Search(NamedTuple):
    """Arguments of a search.

    `global_scale` is the scale of the whole weight. `largest` and `smallest` limit the candidates,
    as factors of a group's largest magnitude. `norm` is the exponent of the errors.
    """

    global_scale: np.float32
    largest: np.float32
    smallest: np.float32
    norm: np.float32


class Lanes(NamedTuple):
    """Groups that are searched together.

    `values` are magnitudes (size, groups). All other arrays have shape (groups,). `absmax` is the
    largest magnitude and `weight` is its importance. `first` and `last` are the codes of the
    largest and the smallest candidate. `best` is the code of the best candidate so far and `least`
    is its error. `scale`, `inverse` and `error` belong to the current candidate.
    """

    values: Floats
    absmax: Floats
    weight: Floats
    least: Floats
    scale: Floats
    inverse: Floats
    error: Floats
    first: Integers
    last: Integers
    best: Integers


@compiled()
def allocate_lanes(groups: int, size: int) -> Lanes:
    """Allocate lanes without filling them."""
    floats, codes = np.empty((6, groups), dtype=F32), np.empty((3, groups), dtype=np.int32)
    return Lanes(
        values=np.empty((size, groups), dtype=F32),
        absmax=floats[0],
        weight=floats[1],
        least=floats[2],
        scale=floats[3],
        inverse=floats[4],
        error=floats[5],
        first=codes[0],
        last=codes[1],
        best=codes[2],
    )


@compiled(inline=True)
def candidate_code(absmax: np.float32, expand: np.float32, global_scale: np.float32) -> np.int32:
    """Return the code of a range's block scale, at least the smallest positive e4m3 code."""
    return max(
        I32(1), e4m3_magnitude_code(F32(F32(F32(absmax * global_scale) / E2M1.high) * expand))
    )


@compiled(inline=True, fastmath=MULTIPLY_ADD)
def distance(value: np.float32, scale: np.float32, inverse: np.float32) -> np.float32:
    """Return |q - x| of a magnitude in e2m1."""
    rounded = round_to(min(F32(value * inverse), E2M1.high), E2M1)
    return F32(abs(value - F32(rounded * scale)))


@compiled()
def transpose(target: Floats, values: Floats, unit: np.float32) -> None:
    """Write the magnitudes of `values` (groups * size,) times `unit` to `target` (size, groups)."""
    wide_vectors()
    size = target.shape[0]
    for j in range(size):
        row = target[j]
        for g in range(row.size):
            row[g] = F32(abs(values[g * size + j]) * unit)


@compiled()
def find_largest(lanes: Lanes, importance: Floats) -> None:
    """Set `absmax` and `weight`: each group's largest magnitude, and its importance."""
    wide_vectors()
    absmax, weight = lanes.absmax, lanes.weight
    absmax[:], weight[:] = F32(-1.0), F32(0.0)
    for j in range(lanes.values.shape[0]):
        values, weights = lanes.values[j], importance[j]
        for g in range(values.size):
            value, largest = values[g], absmax[g]
            value_weight, largest_weight = weights[g], weight[g]
            weight[g] = value_weight if value > largest else largest_weight
            absmax[g] = max(value, largest)


@compiled()
def set_candidates(lanes: Lanes, search: NVFP4Search) -> None:
    """Set the first and last candidate of every group, and the first as the best so far."""
    wide_vectors()
    lanes.least[:] = F32(np.inf)
    for g in range(lanes.absmax.size):
        lanes.first[g] = candidate_code(lanes.absmax[g], search.largest, search.global_scale)
        lanes.last[g] = candidate_code(lanes.absmax[g], search.smallest, search.global_scale)
    lanes.best[:] = lanes.first


@compiled(fastmath=MULTIPLY_ADD)
def next_candidates(lanes: Lanes, offset: int, search: NVFP4Search) -> bool:
    """Set the scales of the candidates that are `offset` codes below the first candidates.

    Returns False if these candidates cannot improve any group. A candidate cannot improve a group
    if clipping the largest value already costs more than the smallest error so far. Smaller
    candidates clip more, so they cannot improve the group either.
    """
    wide_vectors()
    # Two loops: a single loop that writes and reads so many arrays would not be vectorized.
    for g in range(lanes.first.size):
        number = e4m3_value(max(I32(lanes.first[g] - I32(offset)), I32(1)))
        lanes.scale[g] = F32(number / search.global_scale)
        lanes.inverse[g] = F32(search.global_scale / number)
    hopeful = I32(0)
    for g in range(lanes.first.size):
        clipped = max(F32(lanes.absmax[g] - F32(E2M1.high * lanes.scale[g])), F32(0.0))
        bound = F32(F32(lanes.weight[g] * power(clipped, search.norm)) * F32(1.0 - 1e-4))
        tried = I32(lanes.first[g] - I32(offset)) >= lanes.last[g]
        hopeful |= I32(tried & (bound <= lanes.least[g]))
    return bool(hopeful != 0)


@compiled(fastmath=MULTIPLY_ADD)
def write_errors(lanes: Lanes, importance: Floats, norm: np.float32) -> None:
    """Write sum(importance * |q - x|**norm) of every group."""
    wide_vectors()
    scale, inverse, error = lanes.scale, lanes.inverse, lanes.error
    error[:] = F32(0.0)
    for j in range(lanes.values.shape[0]):
        values, weights = lanes.values[j], importance[j]
        if norm == F32(2.4):
            for g in range(values.size):
                d = distance(values[g], scale[g], inverse[g])
                error[g] = F32(error[g] + F32(weights[g] * power_6_5(F32(d * d))))
        elif norm == F32(3.0):
            for g in range(values.size):
                d = distance(values[g], scale[g], inverse[g])
                error[g] = F32(error[g] + F32(weights[g] * F32(F32(d * d) * d)))
        else:
            for g in range(values.size):
                d = distance(values[g], scale[g], inverse[g])
                error[g] = F32(error[g] + F32(weights[g] * power(d, norm)))


@compiled()
def keep_better(lanes: Lanes, offset: int) -> None:
    """Store the current candidate for every group if its error is the smallest so far."""
    wide_vectors()
    for g in range(lanes.best.size):
        code, error, least = I32(lanes.first[g] - I32(offset)), lanes.error[g], lanes.least[g]
        better = (error < least) & (code >= lanes.last[g])
        lanes.best[g] = code if better else lanes.best[g]
        lanes.least[g] = error if better else least


@compiled()
def search_lanes(lanes: Lanes, importance: Floats, search: NVFP4Search, codes: Bytes) -> None:
    """Write the code with the smallest error for every group.

    If two codes have the same error, the larger code wins.
    """
    find_largest(lanes, importance)
    set_candidates(lanes, search)
    offset = 0
    while next_candidates(lanes, offset, search):
        write_errors(lanes, importance, search.norm)
        keep_better(lanes, offset)
        offset += 1
    for g in range(codes.size):
        codes[g] = lanes.best[g] if lanes.absmax[g] != 0 else E4M3_EPS_CODE


@compiled(parallel=True)
def search_block_scales(
    weight: Bits, storage: int, importance: Floats, search: NVFP4Search, codes: Bytes
) -> None:
    """Write the best e4m3 code of every group of columns: `codes` (rows, groups).

    `weight` has shape (rows, columns) and `importance` has shape (columns,). Values and the global
    scale are divided by a power of two so that the global scale is close to 1. This prevents
    overflow and underflow of errors and does not change any choice.
    """
    unit = power_of_two_below(search.global_scale)
    near_one = NVFP4Search(
        F32(search.global_scale / unit), search.largest, search.smallest, search.norm
    )
    groups = codes.shape[1]
    size = weight.shape[1] // groups
    batches = -(-groups // LANES)
    for task in prange(batches * weight.shape[0]):
        row, batch = task // batches, task % batches
        start, stop = batch * groups // batches, (batch + 1) * groups // batches
        part = slice(start * size, stop * size)
        values = np.empty(part.stop - part.start, dtype=F32)
        lanes = allocate_lanes(stop - start, size)
        weights = np.empty(lanes.values.shape, dtype=F32)
        transpose(weights, importance[part], F32(1.0))
        widen(values, weight[row, part], storage)
        transpose(lanes.values, values, unit)
        search_lanes(lanes, weights, near_one, codes[row, start:stop])
