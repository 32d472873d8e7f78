"""The search over NVFP4 block scales: only the few that can be stored.

A block scale is stored as an e4m3 number relative to the global scale, so all ranges between the largest and
the smallest candidate come down to the e4m3 numbers between theirs.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import prange

from vexport.kernels.arithmetic import (
    E2M1,
    E4M3,
    F32,
    I32,
    Bits,
    Floats,
    Steps,
    as_bits,
    chunk_error,
    compiled,
    power_of_two_below,
    round_to,
    value_range,
    widen,
)

Codes = npt.NDArray[np.uint8]

GROUP_SIZE = 16
# The code of 0.125, which the scale of a group of zeros becomes (E4M3_EPS of vexport.observers.qparams).
ZERO_GROUP_CODE = 0x20


class NVFP4Search(NamedTuple):
    """The shared global scale, the ends of the candidates in units of a range, the norm of errors."""

    global_scale: np.float32
    largest: np.float32
    smallest: np.float32
    norm: np.float32


@compiled()
def e4m3_code(value: np.float32) -> int:
    """The code of the nearest e4m3 number of a value >= 0; beyond 448 it is that of 448."""
    rounded = round_to(min(value, E4M3.high), E4M3)
    if rounded < F32(2.0**-6):
        return int(rounded * F32(512.0))
    return int(as_bits(rounded) >> I32(20)) - (120 << 3)


@compiled()
def candidate_code(absmax: np.float32, expand: np.float32, global_scale: np.float32) -> int:
    """The code of the block scale of a range, at least the smallest positive one."""
    return max(1, e4m3_code(F32(F32(F32(absmax * global_scale) / E2M1.high) * expand)))


@compiled()
def best_code(values: Floats, importance: Floats, search: NVFP4Search, scales: Floats) -> int:
    """The code with the smallest error for a group; the larger one of equals."""
    low, high = value_range(values)
    absmax = max(-low, high)
    if absmax == 0:
        return ZERO_GROUP_CODE
    first = candidate_code(absmax, search.largest, search.global_scale)
    last = candidate_code(absmax, search.smallest, search.global_scale)
    best, least = first, F32(np.inf)
    for code in range(first, last - 1, -1):
        scale = F32(scales[code] / search.global_scale)
        steps = Steps(scale, F32(search.global_scale / scales[code]), F32(0.0))
        error = chunk_error(values, importance, steps, E2M1, search.norm)
        if error < least:
            best, least = code, error
    return best


@compiled(parallel=True)
def search_block_scales(
    weight: Bits, storage: int, importance: Floats, search: NVFP4Search, scales: Floats, codes: Codes
) -> None:
    """Write the best e4m3 code of every 16 columns of `weight` (rows, columns).

    `scales` are the numbers of all positive codes. Values and the global scale are divided by a power of two
    so that the latter is near one: no choice changes, and errors neither over- nor underflow.
    """
    unit = power_of_two_below(search.global_scale)
    near_one = NVFP4Search(F32(search.global_scale / unit), search.largest, search.smallest, search.norm)
    for row in prange(weight.shape[0]):
        values = np.empty(weight.shape[1], dtype=F32)
        widen(values, weight[row], storage)
        values *= unit
        for group in range(codes.shape[1]):
            part = slice(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
            codes[row, group] = best_code(values[part], importance[part], near_one, scales)
