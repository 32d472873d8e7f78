"""Searches for the ranges and block scales of weights on the CPU, compiled by numba at their first use.

They read bfloat16, float16 and float32 weights as they are, compute in float32, use all cores, and need a few
hundred kilobytes beside their results. Weights are finite; a group with NaN has a NaN range.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vexport.observers.kernels.arithmetic import (
    BFLOAT16,
    E4M3,
    FLOAT16,
    FLOAT32,
    Bits,
    Floats,
    Format,
    float_format,
    integer_format,
)
from vexport.observers.kernels.grid import (
    TENSOR_CHUNK,
    Doubles,
    search_blocks,
    set_candidates,
    tensor_errors,
    tensor_ranges,
    tiny_unit,
)
from vexport.observers.kernels.nvfp4 import GROUP_SIZE, NVFP4Search, search_block_scales

# The numbers of the positive e4m3 codes.
E4M3_SCALES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
STORAGES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def search_ranges(
    weight: torch.Tensor,
    block: tuple[int, int],
    form: Format,
    shrinks: Sequence[float],
    *,
    norm: float,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The range of every block that quantizes it with the smallest `sum(importance * |q - x|**norm)`.

    `weight` is (rows, columns); `block` is (1, group size), (1, columns) for channels, a block, or (rows,
    columns) for the tensor. The candidates are the block's range times each of `shrinks`; the earlier one
    of equals is taken. Returns (lows, highs), float32, (ceil(rows / height), ceil(columns / width)).
    """
    bits, storage = stored_bits(weight)
    steps = np.asarray(shrinks, dtype=np.float32)
    tangents = tangents_of_power(steps, norm)
    weights = column_importance(importance, weight.shape[1])
    if block == tuple(weight.shape) and importance is None:
        return _search_tensor(bits.reshape(-1), storage, steps, tangents, form, norm)
    grid = tuple(-(-size // part) for size, part in zip(weight.shape, block, strict=True))
    lows, highs = np.empty(grid, dtype=np.float32), np.empty(grid, dtype=np.float32)
    search_blocks(bits, storage, weights, block, steps, tangents, form, np.float32(norm), lows, highs)
    return torch.from_numpy(lows), torch.from_numpy(highs)


def search_nvfp4_scales(
    weight: torch.Tensor,
    global_scale: float,
    *,
    largest: float,
    smallest: float,
    norm: float,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """The e4m3 block scales (rows, columns / 16), relative to the global scale, with the smallest error.

    The error is `sum(importance * |q - x|**norm)` with the scale that is stored. Candidates are all e4m3
    numbers between those of `largest` and `smallest` times a group's range; the larger of equals is taken.
    A scale that would round to zero is the smallest e4m3 number, that of a group of zeros is 0.125.
    """
    bits, storage = stored_bits(weight)
    codes = np.empty((weight.shape[0], weight.shape[1] // GROUP_SIZE), dtype=np.uint8)
    weights = column_importance(importance, weight.shape[1])
    limits = NVFP4Search(
        np.float32(global_scale), np.float32(largest), np.float32(smallest), np.float32(norm)
    )
    powers = E4M3_SCALES.astype(np.float64) ** norm
    search_block_scales(bits, storage, weights, limits, E4M3_SCALES, powers, codes)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def stored_bits(weight: torch.Tensor) -> tuple[Bits, int]:
    """A weight's bits as integers, without a copy where it is contiguous, and how they are to be read."""
    if weight.dtype not in STORAGES:
        known = ", ".join(str(dtype) for dtype in STORAGES)
        raise ValueError(f"weight: got {weight.dtype}, need one of {known}")
    as_integers = torch.int32 if weight.dtype == torch.float32 else torch.uint16
    return weight.detach().contiguous().view(as_integers).numpy(), STORAGES[weight.dtype]


def column_importance(importance: torch.Tensor | None, columns: int) -> Floats:
    """Importance per column as float32; ones where there is none."""
    if importance is None:
        return np.ones(columns, dtype=np.float32)
    return importance.detach().to(torch.float32).contiguous().numpy()


def tangents_of_power(shrinks: Floats, norm: float) -> Doubles:
    """Tangents of r**norm at r = shrink: float64, (2, shrinks), constant and slope."""
    at = shrinks.astype(np.float64)
    return np.stack([(1 - norm) * at**norm, norm * at ** (norm - 1)])


def _search_tensor(
    bits: Bits, storage: int, shrinks: Floats, tangents: Doubles, form: Format, norm: float
) -> tuple[torch.Tensor, torch.Tensor]:
    chunks = -(-bits.size // TENSOR_CHUNK)
    lows, highs = np.empty(chunks, dtype=np.float32), np.empty(chunks, dtype=np.float32)
    tensor_ranges(bits, storage, lows, highs)
    low, high = lows.min(), highs.max()
    unit = tiny_unit(low, high)
    inverses, zeros, units = np.empty_like(shrinks), np.empty_like(shrinks), np.empty(shrinks.size)
    set_candidates(low * unit, high * unit, shrinks, tangents, form, inverses, zeros, units)
    errors = np.empty((chunks, shrinks.size), dtype=np.float64)
    tensor_errors(bits, storage, unit, inverses, zeros, form, np.float32(norm), errors)
    shrink = shrinks[(errors.sum(0) * units).argmin()]
    return torch.tensor([[low * shrink]]), torch.tensor([[high * shrink]])


__all__ = ["E4M3", "Format", "float_format", "integer_format", "search_nvfp4_scales", "search_ranges"]
