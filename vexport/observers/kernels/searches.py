"""The compiled searches on tensors.

They read bfloat16, float16 and float32 values as they are, others and those of another device as a copy,
compute in float32, use all cores, and need room for a few groups next to their results. A group with NaN or
infinity has a range that is not finite.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import prange

from vexport.numerics.arithmetic import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Bits,
    Floats,
    NumberFormat,
)
from vexport.numerics.jit import compiled
from vexport.observers.kernels.grid import (
    TASK_VALUES,
    TENSOR_CHUNK,
    group_ranges,
    search_groups,
    tensor_ranges,
)
from vexport.observers.kernels.nvfp4 import NVFP4Search, search_block_scales

# Each thread that counts has its own half megabyte.
COUNTING_TASKS = 16
# Lanes of the widest vectors.
VECTOR = 16
STORAGES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


Counts = npt.NDArray[np.int64]

PATTERNS = 1 << 16


@compiled(parallel=True)
def add_counts(values: Bits, counts: Counts) -> None:
    """Count the 16-bit patterns of flat `values` in `counts` (tasks, PATTERNS), each task in its own row."""
    tasks = counts.shape[0]
    for task in prange(tasks):
        row = counts[task]
        for i in range(task * values.size // tasks, (task + 1) * values.size // tasks):
            row[values[i]] += 1


class GroupChoices(NamedTuple):
    """Range (float32) and best step of every group; for every step, whether it improved a group."""

    low: torch.Tensor
    high: torch.Tensor
    step: torch.Tensor
    improved: list[bool]


def search_grid_groups(
    groups: torch.Tensor,
    form: NumberFormat,
    shrinks: Sequence[float],
    *,
    norm: float,
    expand: float = 1.0,
    importance: torch.Tensor | None = None,
) -> GroupChoices:
    """For every row of `groups` (count, size) the shrink with the least `sum(importance * |q - x|**norm)`.

    Candidates are the row's range times `expand` times each of `shrinks`; the earlier one of equals is
    taken. Row i has the importance of row i modulo the rows of `importance` (any, size).
    """
    bits, storage = stored_bits(groups)
    count, size = bits.shape
    factors = np.asarray(shrinks, dtype=np.float32)
    lows, highs = np.empty(count, dtype=np.float32), np.empty(count, dtype=np.float32)
    steps = np.empty(count, dtype=np.int64)
    improved = np.zeros((min(count, -(-bits.size // TASK_VALUES)), factors.size), dtype=np.bool_)
    whole_vectors = np.pad(factors, (0, -factors.size % VECTOR), mode="edge")
    search_groups(
        bits,
        storage,
        importance_rows(importance, size),
        np.float32(expand),
        whole_vectors,
        form,
        np.float32(norm),
        lows,
        highs,
        steps,
        improved,
    )
    ends = torch.from_numpy(lows), torch.from_numpy(highs)
    return GroupChoices(*ends, torch.from_numpy(steps), [bool(flags.any()) for flags in improved.T])


def ranges_of_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of every row of `groups` (count, size): float32; NaN where one is NaN."""
    bits, storage = stored_bits(groups)
    lows, highs = (np.empty(bits.shape[0], dtype=np.float32) for _ in range(2))
    group_ranges(bits, storage, min(bits.shape[0], -(-bits.size // TASK_VALUES)), lows, highs)
    return torch.from_numpy(lows), torch.from_numpy(highs)


def distinct_values(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The different numbers in values of 16 bits, and how often each occurs: both float32, (numbers,)."""
    counts = np.zeros((min(numba.get_num_threads(), COUNTING_TASKS), PATTERNS), dtype=np.int64)
    add_counts(stored_bits(values)[0].reshape(-1), counts)
    total = counts.sum(0)
    patterns = np.flatnonzero(total)
    numbers = torch.from_numpy(patterns.astype(np.uint16)).view(values.dtype).to(torch.float32)
    return numbers, torch.from_numpy(total[patterns]).to(torch.float32)


def range_of_values(values: torch.Tensor) -> tuple[float, float]:
    """Smallest and largest of all values; NaN where one is NaN."""
    bits, storage = stored_bits(values)
    chunks = -(-bits.size // TENSOR_CHUNK)
    lows, highs = np.empty(chunks, dtype=np.float32), np.empty(chunks, dtype=np.float32)
    tensor_ranges(bits.reshape(-1), storage, lows, highs)
    return float(lows.min()), float(highs.max())


def search_nvfp4_scales(
    groups: torch.Tensor,
    global_scale: float,
    *,
    largest: float,
    smallest: float,
    norm: float,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """The e4m3 block scales, relative to the global scale, with the smallest error: (rows, groups).

    `groups` are (rows, groups, size). The error is `sum(importance * |q - x|**norm)` with the scale that is
    stored. Candidates are all e4m3 numbers between those of `largest` and `smallest` times a group's range;
    the larger of equals is taken. A scale that would round to zero is the smallest e4m3 number, that of a
    group of zeros is 0.125.
    """
    bits, storage = stored_bits(groups.reshape(len(groups), -1))
    codes = np.empty(groups.shape[:2], dtype=np.uint8)
    weights = importance_rows(importance, bits.shape[1])[0]
    limits = NVFP4Search(
        np.float32(global_scale), np.float32(largest), np.float32(smallest), np.float32(norm)
    )
    search_block_scales(bits, storage, weights, limits, codes)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def readable(values: torch.Tensor) -> torch.Tensor:
    """Values as kernels read them: in main memory, float32 where they are not of 16 bits."""
    values = values.detach().to("cpu")
    return values if values.dtype in STORAGES else values.to(torch.float32)


def stored_bits(values: torch.Tensor) -> tuple[Bits, int]:
    """The bits of values as integers, without a copy where that is possible, and how they are to be read."""
    values = readable(values)
    as_integers = torch.int32 if values.dtype == torch.float32 else torch.uint16
    return values.contiguous().view(as_integers).numpy(), STORAGES[values.dtype]


def importance_rows(importance: torch.Tensor | None, size: int) -> Floats:
    """Importance as float32 (rows, size); one row of ones where there is none."""
    if importance is None:
        return np.ones((1, size), dtype=np.float32)
    return readable(importance).to(torch.float32).contiguous().reshape(-1, size).numpy()
