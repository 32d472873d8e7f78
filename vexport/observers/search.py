"""Search for the range of each group that gives the smallest quantization error.

A search processes one tile after another, in float32 and on the tensor's device. It uses compiled
kernels on the CPU and torch on other devices (`vexport.observers.device_search`). The kernels read
bfloat16, float16 and float32 values directly; other dtypes are copied first. The error of a group
is `sum(importance * |dequantized - value| ** norm)` (llm-compressor, observers/mse_quant.py and
imatrix.py). The range of a group that contains NaN or infinity is not finite.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numba
import numpy as np
import torch

from vexport.numerics import tensors
from vexport.numerics.arithmetic import Bits, Floats
from vexport.numerics.number_formats import (
    BFLOAT16,
    E2M1,
    E4M3,
    E8M0,
    FLOAT16,
    FLOAT32,
    NumberFormat,
    integer_format,
)
from vexport.numerics.tensors import round_to
from vexport.observers import device_search
from vexport.observers.device_search import GroupChoices
from vexport.observers.flatten import Tiles
from vexport.observers.kernels.grid import (
    BIT_PATTERNS,
    TASK_VALUES,
    TENSOR_CHUNK,
    add_counts,
    group_ranges,
    search_groups,
    tensor_ranges,
)
from vexport.observers.kernels.nvfp4 import NVFP4Search, search_block_scales
from vexport.observers.qparams import (
    ObserverArgs,
    is_float,
    is_mx,
    scale_and_zero_point,
    stored_dtype,
)
from vexport.records.observer_names import SearchOptions

# Each counting thread allocates half a megabyte.
COUNTING_TASKS = 16
# Number of float32 lanes in the widest vectors.
VECTOR_LANES = 16
STORAGES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
Range = tuple[torch.Tensor, torch.Tensor]
# llm-compressor computes candidates in bf16. It rounds three times, each time by at most 2**-8. The
# limits of the candidates are extended by this share, so that the candidates include every scale
# that llm-compressor could choose.
CANDIDATE_SLACK = 2.0**-6
# Number of rows used to compare global scales.
SAMPLED_ROWS = 64


def search_grid_groups(
    groups: torch.Tensor,
    form: NumberFormat,
    shrinks: Sequence[float],
    *,
    norm: float,
    expand: float = 1.0,
    importance: torch.Tensor | None = None,
) -> GroupChoices:
    """Find the shrink with the smallest error for every row of `groups` (count, size).

    The error is `sum(importance * |q - x|**norm)`. The candidates are the row's range times
    `expand` times each of `shrinks`. If two candidates are equally good, the earlier candidate
    wins. Row i uses row i of `importance` (any, size), modulo the number of these rows.
    """
    bits, storage = stored_bits(groups)
    count, size = bits.shape
    factors = np.asarray(shrinks, dtype=np.float32)
    lows, highs = np.empty(count, dtype=np.float32), np.empty(count, dtype=np.float32)
    steps = np.empty(count, dtype=np.int64)
    improved = np.zeros((min(count, -(-bits.size // TASK_VALUES)), factors.size), dtype=np.bool_)
    whole_vectors = np.pad(factors, (0, -factors.size % VECTOR_LANES), mode="edge")
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
    low, high, step = map(torch.from_numpy, (lows, highs, steps))
    return GroupChoices(low, high, step, [bool(flags.any()) for flags in improved.T])


def ranges_of_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest value of every row of `groups` (count, size), float32.

    If a row contains NaN, at least one of its results is NaN.
    """
    bits, storage = stored_bits(groups)
    lows, highs = (np.empty(bits.shape[0], dtype=np.float32) for _ in range(2))
    group_ranges(bits, storage, min(bits.shape[0], -(-bits.size // TASK_VALUES)), lows, highs)
    return torch.from_numpy(lows), torch.from_numpy(highs)


def distinct_values(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct values of a 16-bit tensor and their counts, both float32 (numbers,)."""
    counts = np.zeros((min(numba.get_num_threads(), COUNTING_TASKS), BIT_PATTERNS), dtype=np.int64)
    add_counts(stored_bits(values)[0].reshape(-1), counts)
    total = counts.sum(0)
    patterns = np.flatnonzero(total)
    numbers = torch.from_numpy(patterns.astype(np.uint16)).view(values.dtype).to(torch.float32)
    return numbers, torch.from_numpy(total[patterns]).to(torch.float32)


def range_of_values(values: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest of all values. If a value is NaN, at least one result is
    NaN.
    """
    bits, storage = stored_bits(values)
    chunks = -(-bits.size // TENSOR_CHUNK)
    lows, highs = np.empty(chunks, dtype=np.float32), np.empty(chunks, dtype=np.float32)
    tensor_ranges(bits.reshape(-1), storage, lows, highs)
    return float(lows.min()), float(highs.max())


def as_kernel_input(values: torch.Tensor) -> torch.Tensor:
    """Return CPU values in a dtype that kernels read: float32, bfloat16 or float16."""
    assert values.device.type == "cpu", "kernels read main memory"
    values = values.detach()
    return values if values.dtype in STORAGES else values.to(torch.float32)


def stored_bits(values: torch.Tensor) -> tuple[Bits, int]:
    """Return the bits of values as integers, without a copy if possible, and a storage code."""
    values = as_kernel_input(values)
    as_integers = torch.int32 if values.dtype == torch.float32 else torch.uint16
    return values.contiguous().view(as_integers).numpy(), STORAGES[values.dtype]


def importance_rows(importance: torch.Tensor | None, size: int) -> Floats:
    """Return the importance as float32 (rows, size), or a single row of ones without importance."""
    if importance is None:
        return np.ones((1, size), dtype=np.float32)
    return as_kernel_input(importance).to(torch.float32).contiguous().reshape(-1, size).numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Candidates of a search: the observed range times `expand` times each of `factors`, in order.

    The search stops after `patience` steps in which no group improved; 0 disables this.
    """

    factors: tuple[float, ...]
    expand: float
    norm: float
    patience: int


def search_of(options: SearchOptions, steps: int) -> Search:
    """Return the search over the first `steps` candidates."""
    factors = tuple(1 - step / options.grid for step in range(steps))
    return Search(
        factors=factors, expand=options.expand, norm=options.norm, patience=int(options.patience)
    )


def range_of(tiles: Tiles) -> Range:
    """Return the minimum and maximum of each group: float32, shape qparam_shape."""
    return _concatenated(ranges_of_rows(tiles), tiles)


def ranges_of_rows(tiles: Tiles) -> Iterator[tuple[slice, Range]]:
    """Yield slices of rows (the first dimension of qparam_shape) with the minimum and maximum of
    their groups.
    """
    for rows, tile in tiles.by_rows():
        if tile.device.type != "cpu" or tile.dtype not in STORAGES or tile.shape[0] != 1:
            yield rows, (tile.amin((0, -1)).float(), tile.amax((0, -1)).float())
        else:
            low, high = ranges_of_groups(tile.reshape(-1, tile.shape[-1]))
            yield rows, (low.reshape(tile.shape[1:-1]), high.reshape(tile.shape[1:-1]))


def extremes_of(tiles: Tiles) -> Range:
    """Return the smallest and the largest of all values: float32 without dimensions."""
    if tiles.device.type != "cpu":
        lows, highs = zip(*(torch.aminmax(tile) for _, tile in tiles.by_rows()), strict=True)
        return torch.stack(lows).amin().float(), torch.stack(highs).amax().float()
    ends = torch.tensor([range_of_values(tile) for _, tile in tiles.by_rows()], device=tiles.device)
    return ends[:, 0].amin(), ends[:, 1].amax()


def search_grid(
    tiles: Tiles, args: ObserverArgs, search: Search, importance: torch.Tensor | None = None
) -> Range:
    """Return the best range (low, high) of each group: float32, shape qparam_shape.

    Both ends are shrunk together. `importance` broadcasts to a tile. If two candidates are equally
    good, the earlier candidate wins.
    """
    return _concatenated(search_rows(tiles, args, search, importance), tiles)


def search_rows(
    tiles: Tiles, args: ObserverArgs, search: Search, importance: torch.Tensor | None
) -> Iterator[tuple[slice, Range]]:
    """Yield slices of rows (the first dimension of qparam_shape) with the best ranges of their
    groups.

    The search must stop after `patience` steps without an improvement in any tile, so a single tile
    cannot decide when to stop. All tiles therefore try all steps first. If a group chose a step
    after the search should have stopped, the search is repeated without the later steps. All rows
    are then yielded a second time.
    """
    form, improved = format_of(args), [False] * len(search.factors)
    for rows, tile in tiles.by_rows():
        choices = _search_tile(tile, form, search, importance)
        factors = torch.tensor(search.factors, device=tile.device)
        factor = factors[choices.step]
        shape = tile.shape[1:-1]
        yield rows, ((choices.low * factor).view(shape), (choices.high * factor).view(shape))
        improved = [a or b for a, b in zip(improved, choices.improved, strict=True)]
    steps = _steps_until_stop(improved, search.patience)
    if any(improved[steps:]):
        yield from search_rows(
            tiles, args, replace(search, factors=search.factors[:steps]), importance
        )


def format_of(args: ObserverArgs) -> NumberFormat:
    """Return the number format of the quantized values, including the storage of scales."""
    form = integer_format(args.num_bits)
    if is_float(args):
        form = E2M1 if args.num_bits == 4 else E4M3
    storage = E8M0 if is_mx(args) else STORAGES[stored_dtype(args)]
    return form._replace(zero_points=not args.symmetric, scale_storage=storage)


def _search_tile(
    tile: torch.Tensor, form: NumberFormat, search: Search, importance: torch.Tensor | None
) -> GroupChoices:
    """Find the best factor of each group in a tile (num_observations, *qparam_shape, size)."""
    groups = tile.movedim(0, -2).reshape(math.prod(tile.shape[1:-1]), -1)
    if tile.device.type != "cpu":
        return device_search.search_grid_groups(
            groups,
            form,
            search.factors,
            norm=search.norm,
            expand=search.expand,
            importance=importance,
        )
    groups = as_kernel_input(groups)
    if (
        len(groups) == 1
        and importance is None
        and tile.dtype.itemsize == 2
        and tile.numel() >= BIT_PATTERNS
    ):
        groups, importance = (
            part.view(1, -1) for part in distinct_values(tile)
        )  # search each distinct value once
    return search_grid_groups(
        groups, form, search.factors, norm=search.norm, expand=search.expand, importance=importance
    )


def _steps_until_stop(improved: Sequence[bool], patience: int) -> int:
    stale = 0
    for step, better in enumerate(improved):
        stale = 0 if better else stale + 1
        if patience and stale >= patience:
            return step + 1
    return len(improved)


def _concatenated(ranges: Iterable[tuple[slice, Range]], tiles: Tiles) -> Range:
    low, high = (torch.empty(tiles.qparam_shape, device=tiles.device) for _ in range(2))
    for rows, ends in ranges:
        low[rows], high[rows] = ends
    return low, high


def scales_of_rows(
    ranges: Iterable[tuple[slice, Range]],
    tiles: Tiles,
    args: ObserverArgs,
    global_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale (float32) and zero point (int32), both of shape qparam_shape.

    If `ranges` yields the same rows twice, the later ranges replace the earlier ranges. Only the
    ranges of a single tile are in memory at a time.
    """
    scale = torch.empty(tiles.qparam_shape, device=tiles.device)
    zero_point = torch.zeros(tiles.qparam_shape, dtype=torch.int32, device=tiles.device)
    for rows, (low, high) in ranges:
        scale[rows], zeros = scale_and_zero_point(low, high, args, global_scale)
        if not args.symmetric:
            zero_point[rows] = zeros
    return scale, zero_point


def block_scales(
    groups: torch.Tensor,
    global_scale: torch.Tensor,
    search: Search,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the relative block scales with the smallest error: float32 e4m3 values.

    `groups` has shape (rows, groups, size), and the result has shape (rows, groups). `global_scale`
    has shape (1,), and `importance` broadcasts. The error `sum(importance * |q - x|**norm)` is
    computed with the stored scale.

    All e4m3 values between the last and the first candidate of `search` are tried, without grid or
    patience. If two scales are equally good, the larger scale wins. A scale that would round to
    zero becomes the smallest e4m3 value. The scale of a group of zeros is 0.125.
    """
    largest = np.float32(max(search.factors) * search.expand * (1 + CANDIDATE_SLACK))
    smallest = np.float32(min(search.factors) * search.expand * (1 - CANDIDATE_SLACK))
    if groups.device.type != "cpu":
        return device_search.block_scales(
            groups,
            global_scale,
            largest=float(largest),
            smallest=float(smallest),
            norm=search.norm,
            importance=importance,
        )
    bits, storage = stored_bits(groups.reshape(len(groups), -1))
    codes = np.empty(groups.shape[:2], dtype=np.uint8)
    limits = NVFP4Search(
        global_scale=np.float32(float(global_scale)),
        largest=largest,
        smallest=smallest,
        norm=np.float32(search.norm),
    )
    search_block_scales(bits, storage, importance_rows(importance, bits.shape[1])[0], limits, codes)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32)


def nvfp4_error(
    tiles: Tiles, global_scale: torch.Tensor, search: Search, importance: torch.Tensor | None
) -> float:
    """Return the quantization error of an NVFP4 weight with this global scale and its best block
    scales.

    Only about SAMPLED_ROWS evenly spaced rows are used.
    """
    step = -(-tiles.qparam_shape[0] // SAMPLED_ROWS)
    weight, total = None if importance is None else importance[0], 0.0
    for _, tile in tiles.by_rows():
        rows = tile[0, ::step].contiguous()
        scales = block_scales(rows, global_scale, search, importance)
        total += float(block_errors(rows.float(), scales / global_scale, search.norm, weight).sum())
    return total


def block_errors(
    values: torch.Tensor, step: torch.Tensor, norm: float, importance: torch.Tensor | None
) -> torch.Tensor:
    """Return the e2m1 quantization error of each group of `values` (..., group_size), float32.

    `step` (...) is the scale of each group.
    """
    steps = step.unsqueeze(-1)
    error = round_to(values / steps, tensors.E2M1).mul_(steps).sub_(values).abs_().pow_(norm)
    if importance is not None:
        error.mul_(importance)
    return error.sum(-1)
