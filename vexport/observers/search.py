"""Searches for the range of each group whose quantization error is least, by compiled kernels.

They work a tile at a time and in float32, on the CPU wherever the tensor is. The error of a group is
`sum(importance * |dequantized - value| ** norm)` (llm-compressor, observers/mse_quant.py and imatrix.py).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from vexport.numerics.arithmetic import E2M1, E4M3, E8M0, NumberFormat, integer_format
from vexport.observers.flatten import Tiles
from vexport.observers.kernels.searches import (
    PATTERNS,
    STORAGES,
    GroupChoices,
    distinct_values,
    range_of_values,
    ranges_of_groups,
    readable,
    search_grid_groups,
    search_nvfp4_scales,
)
from vexport.observers.qparams import (
    ObserverArgs,
    is_float,
    is_mx,
    round_to_e2m1,
    scale_and_zero_point,
    stored_dtype,
)
from vexport.records.observer_names import SearchOptions

Range = tuple[torch.Tensor, torch.Tensor]
# The peer computes candidates in bf16: its range may be off by three roundings of 2**-8 each. Candidates
# reach so much further at both ends that whatever it could choose is among them.
CANDIDATE_SLACK = 2.0**-6
# Rows that global scales are compared by.
SAMPLED_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The candidates of a search: the observed range times `expand` times each of `factors`, in that order.

    `patience` steps without an improvement in any group end the search; 0 turns that off.
    """

    factors: tuple[float, ...]
    expand: float
    norm: float
    patience: int


def search_of(options: SearchOptions, steps: int) -> Search:
    """The search over the first `steps` candidates."""
    factors = tuple(1 - step / options.grid for step in range(steps))
    return Search(factors=factors, expand=options.expand, norm=options.norm, patience=int(options.patience))


def range_of(tiles: Tiles) -> Range:
    """Minimum and maximum of each group, float32, shape qparam_shape."""
    return _together(ranges_of_rows(tiles), tiles)


def ranges_of_rows(tiles: Tiles) -> Iterator[tuple[slice, Range]]:
    """The same for some rows of qparam_shape after the other."""
    for rows, tile in tiles.by_rows():
        if tile.device.type != "cpu" or tile.dtype not in STORAGES or tile.shape[0] != 1:
            yield rows, (tile.amin((0, -1)).float(), tile.amax((0, -1)).float())
        else:
            low, high = ranges_of_groups(tile.reshape(-1, tile.shape[-1]))
            yield rows, (low.reshape(tile.shape[1:-1]), high.reshape(tile.shape[1:-1]))


def extremes_of(tiles: Tiles) -> Range:
    """The smallest and the largest of all values, float32, of no dimension."""
    ends = torch.tensor([range_of_values(tile) for _, tile in tiles.by_rows()], device=tiles.device)
    return ends[:, 0].amin(), ends[:, 1].amax()


def search_grid(
    tiles: Tiles, args: ObserverArgs, search: Search, importance: torch.Tensor | None = None
) -> Range:
    """The best (low, high) of each group, float32, shape qparam_shape: both ends shrunk together.

    `importance` broadcasts to a tile. The earlier of two equal candidates is kept.
    """
    return _together(search_rows(tiles, args, search, importance), tiles)


def search_rows(
    tiles: Tiles, args: ObserverArgs, search: Search, importance: torch.Tensor | None
) -> Iterator[tuple[slice, Range]]:
    """The same for some rows of qparam_shape after the other.

    Patience counts over all groups whatever the tiles, so a tile cannot stop by itself: all steps are
    tried, and once more without the late ones in the rare case that one of those was chosen. All rows come
    again then.
    """
    form, improved = format_of(args), [False] * len(search.factors)
    for rows, tile in tiles.by_rows():
        choices = search_tile(readable(tile), form, search, importance)
        factor, shape = torch.tensor(search.factors)[choices.step], tile.shape[1:-1]
        low, high = ((end * factor).view(shape).to(tile.device) for end in (choices.low, choices.high))
        yield rows, (low, high)
        improved = [a or b for a, b in zip(improved, choices.improved, strict=True)]
    shorter = _within_patience(search, improved)
    if shorter != search:
        yield from search_rows(tiles, args, shorter, importance)


def format_of(args: ObserverArgs) -> NumberFormat:
    """The format that values are rounded to, with scales as they are stored."""
    form = integer_format(args.num_bits)
    if is_float(args):
        form = E2M1 if args.num_bits == 4 else E4M3
    storage = E8M0 if is_mx(args) else STORAGES[stored_dtype(args)]
    return form._replace(zero_points=not args.symmetric, scale_storage=storage)


def search_tile(
    tile: torch.Tensor, form: NumberFormat, search: Search, importance: torch.Tensor | None
) -> GroupChoices:
    """The best factor of each group of a tile (num_observations, *qparam_shape, group_size)."""
    groups = tile.movedim(0, -2).reshape(math.prod(tile.shape[1:-1]), -1)
    if len(groups) == 1 and importance is None and tile.dtype.itemsize == 2 and tile.numel() >= PATTERNS:
        groups, importance = (part.view(1, -1) for part in distinct_values(tile))  # each number once
    return search_grid_groups(
        groups, form, search.factors, norm=search.norm, expand=search.expand, importance=importance
    )


def _within_patience(search: Search, improved: Sequence[bool]) -> Search:
    """Without the steps beyond the patience, where one of them was chosen; else the search as it is."""
    steps = _steps_until_stop(improved, search.patience)
    return replace(search, factors=search.factors[:steps]) if any(improved[steps:]) else search


def _steps_until_stop(improved: Sequence[bool], patience: int) -> int:
    stale = 0
    for step, better in enumerate(improved):
        stale = 0 if better else stale + 1
        if patience and stale >= patience:
            return step + 1
    return len(improved)


def _together(ranges: Iterable[tuple[slice, Range]], tiles: Tiles) -> Range:
    low, high = (torch.empty(tiles.groups, device=tiles.device) for _ in range(2))
    for rows, ends in ranges:
        low[rows], high[rows] = ends
    return low, high


def scales_of_rows(
    ranges: Iterable[tuple[slice, Range]],
    tiles: Tiles,
    args: ObserverArgs,
    global_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale (float32) and zero point (int32), shape qparam_shape; `ranges` of the same rows replace others.

    The ranges of all groups together are never in memory.
    """
    scale = torch.empty(tiles.groups, device=tiles.device)
    zero_point = torch.zeros(tiles.groups, dtype=torch.int32, device=tiles.device)
    for rows, (low, high) in ranges:
        scale[rows], zeros = scale_and_zero_point(low, high, args, global_scale)
        if not args.symmetric:
            zero_point[rows] = zeros
    return scale, zero_point


def search_nvfp4(
    tiles: Tiles,
    global_scale: torch.Tensor,
    search: Search,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best stored block scale of each group: float32 holding e4m3 values, shape qparam_shape.

    A tile is (1, rows, groups, group_size) in any float dtype; `global_scale` is the shared one, float32
    (1,). What a block scale can be is an e4m3 number, so the few of them that lie between the last and the
    first candidate of `search` are all tried: no grid and no patience is needed. `importance` broadcasts to
    a tile.
    """
    best = torch.empty(tiles.groups, device=tiles.device)
    for rows, tile in tiles.by_rows():
        best[rows] = _block_scales(tile, global_scale, search, importance)
    return best


def _block_scales(
    tile: torch.Tensor, global_scale: torch.Tensor, search: Search, importance: torch.Tensor | None
) -> torch.Tensor:
    scales = search_nvfp4_scales(
        tile[0],
        float(global_scale),
        smallest=min(search.factors) * search.expand * (1 - CANDIDATE_SLACK),
        largest=max(search.factors) * search.expand * (1 + CANDIDATE_SLACK),
        norm=search.norm,
        importance=importance,
    )
    return scales.to(tile.device, torch.float32)


def nvfp4_error(
    tiles: Tiles, global_scale: torch.Tensor, search: Search, importance: torch.Tensor | None
) -> float:
    """The error that the best block scales leave with this global scale, in rows spread over a weight."""
    step = -(-tiles.groups[0] // SAMPLED_ROWS)
    weight, total = None if importance is None else importance[0], 0.0
    for _, tile in tiles.by_rows():
        rows = tile[:, ::step].contiguous()
        scales = _block_scales(rows, global_scale, search, importance)
        total += float(block_errors(rows[0].float(), scales / global_scale, search.norm, weight).sum())
    return total


def block_errors(
    values: torch.Tensor, step: torch.Tensor, norm: float, importance: torch.Tensor | None
) -> torch.Tensor:
    """Error of each group of `values` (..., group_size), float32, in e2m1 with a `step` (...) each."""
    steps = step.unsqueeze(-1)
    error = round_to_e2m1(values / steps).mul_(steps).sub_(values).abs_().pow_(norm)
    if importance is not None:
        error.mul_(importance)
    return error.sum(-1)
