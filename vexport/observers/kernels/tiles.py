"""The compiled searches on tiles of observations: what they serve, results in the shape of the qparams."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vexport.observers.args import ObserverArgs, is_float, is_mx
from vexport.observers.kernels import (
    E2M1,
    E4M3,
    Format,
    distinct_values,
    integer_format,
    range_of_values,
    ranges_of_groups,
    search_grid_groups,
    search_nvfp4_scales,
    serves,
    shrink_errors,
)
from vexport.observers.kernels.counts import PATTERNS
from vexport.observers.kernels.nvfp4 import GROUP_SIZE
from vexport.observers.tiles import Tiles


class Factors(NamedTuple):
    """Range before shrinking (float32) and best step, shape qparam_shape; whether each step improved any."""

    low: torch.Tensor
    high: torch.Tensor
    step: torch.Tensor
    improved: list[bool]


def serves_grid(tiles: Tiles, args: ObserverArgs, importance: torch.Tensor | None) -> bool:
    """Whether `search_tiles` does this search: on the CPU, a weight in groups or values of one group."""
    tile = next(iter(tiles))
    one_group = tile.shape[1:-1].numel() == 1 and importance is None
    known = not is_mx(args) and (args.symmetric or not is_float(args))
    return known and serves(tile) and (one_group if tiles.shared else tile.shape[0] == 1)


def search_tiles(
    tiles: Tiles,
    args: ObserverArgs,
    factors: Sequence[float],
    *,
    expand: float,
    norm: float,
    importance: torch.Tensor | None,
) -> Factors:
    """The best of `factors` for the range, times `expand`, of each group."""
    form = format_of(args)
    if tiles.shared:
        return _search_one_group(tiles, form, factors, expand, norm)
    lows, highs, steps, improved = [], [], [], [False] * len(factors)
    for tile in tiles:
        rows = tile.reshape(-1, tile.shape[-1])
        part = search_grid_groups(rows, form, factors, norm=norm, expand=expand, importance=importance)
        shape = tile.shape[1:-1]
        lows.append(part.low.reshape(shape))
        highs.append(part.high.reshape(shape))
        # There are at most some hundred factors, and as many steps as groups.
        steps.append(part.step.reshape(shape).to(torch.int16))
        improved = [a or b for a, b in zip(improved, part.improved, strict=True)]
    return Factors(low=joined(lows), high=joined(highs), step=joined(steps), improved=improved)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts one after another; `parts` is emptied, so that nothing stays in memory twice."""
    whole = torch.cat(parts)
    parts.clear()
    return whole


def range_of_tile(tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimum and maximum of each group of a tile (num_observations, *qparam_shape, group_size), float32."""
    if not serves(tile) or tile.shape[0] != 1:
        return tile.amin((0, -1)).float(), tile.amax((0, -1)).float()
    low, high = ranges_of_groups(tile.reshape(-1, tile.shape[-1]))
    return low.reshape(tile.shape[1:-1]), high.reshape(tile.shape[1:-1])


def extremes_of_tile(tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of a tile, float32, of no dimension."""
    if not serves(tile):
        return tile.amin().float(), tile.amax().float()
    low, high = range_of_values(tile)
    return torch.tensor(low), torch.tensor(high)


def format_of(args: ObserverArgs) -> Format:
    """What values are rounded to."""
    if is_float(args):
        return E2M1 if args.num_bits == 4 else E4M3
    return integer_format(args.num_bits, symmetric=args.symmetric)


def serves_nvfp4(tile: torch.Tensor) -> bool:
    """Whether `nvfp4_scales_of_tile` does this search."""
    return serves(tile) and tile.shape[-1] == GROUP_SIZE


def nvfp4_scales_of_tile(
    tile: torch.Tensor,
    global_scale: torch.Tensor,
    bounds: tuple[float, float],
    norm: float,
    importance: torch.Tensor | None,
) -> torch.Tensor:
    """The best block scales of a tile (rows, groups, 16): float8_e4m3fn, (rows, groups).

    Candidates lie between `bounds` (smallest, largest) times a group's range.
    """
    return search_nvfp4_scales(
        tile.reshape(tile.shape[0], -1),
        float(global_scale),
        smallest=bounds[0],
        largest=bounds[1],
        norm=norm,
        importance=importance,
    )


def _search_one_group(
    tiles: Tiles, form: Format, factors: Sequence[float], expand: float, norm: float
) -> Factors:
    first = next(iter(tiles))
    shape = first.shape[1:-1]
    if first.dtype.itemsize == 2 and first.numel() >= PATTERNS:
        values, counts = distinct_values(tiles, first.dtype)
        one = search_grid_groups(
            values.unsqueeze(0), form, factors, norm=norm, expand=expand, importance=counts.unsqueeze(0)
        )
        return Factors(one.low.expand(shape), one.high.expand(shape), one.step.expand(shape), one.improved)
    ranges = torch.tensor([range_of_values(tile) for tile in tiles]) * expand
    low, high = ranges[:, 0].amin(), ranges[:, 1].amax()
    ends = float(low), float(high)
    errors = torch.stack([shrink_errors(tile, ends, form, factors, norm=norm) for tile in tiles]).sum(0)
    best_so_far = torch.cat([torch.tensor([torch.inf], dtype=errors.dtype), errors.cummin(0).values[:-1]])
    step = errors.argmin().expand(shape)
    return Factors(low.expand(shape), high.expand(shape), step, (errors < best_so_far).tolist())
