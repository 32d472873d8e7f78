"""The compiled searches on tiles of observations: what they serve, results in the shape of the qparams."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vexport.numerics.arithmetic import E2M1, E4M3, Format, integer_format
from vexport.numerics.constants import NVFP4_GROUP
from vexport.observers.args import ObserverArgs, is_float, is_mx
from vexport.observers.kernels.searches import (
    PATTERNS,
    STORAGES,
    distinct_values,
    range_of_values,
    ranges_of_groups,
    search_grid_groups,
    search_nvfp4_scales,
    serves,
    shrink_errors,
)
from vexport.observers.qparams import stored_dtype
from vexport.observers.tiles import Tiles


class BestFactors(NamedTuple):
    """Range before shrinking and best factor, float32, qparam_shape; whether each factor improved any."""

    low: torch.Tensor
    high: torch.Tensor
    factor: torch.Tensor
    improved: list[bool]


def serves_grid(tile: torch.Tensor, args: ObserverArgs) -> bool:
    """Whether `search_tile` and `search_one_group` do this search."""
    return serves(tile) and not is_mx(args) and (args.symmetric or not is_float(args))


def search_tile(
    tile: torch.Tensor,
    args: ObserverArgs,
    factors: Sequence[float],
    *,
    expand: float,
    norm: float,
    importance: torch.Tensor | None,
) -> BestFactors:
    """The best factor of the range, times `expand`, of each group of a tile (1, *qparam_shape, size)."""
    rows, shape = tile.reshape(-1, tile.shape[-1]), tile.shape[1:-1]
    best = search_grid_groups(rows, format_of(args), factors, norm=norm, expand=expand, importance=importance)
    chosen = torch.tensor(factors)[best.step]
    return BestFactors(best.low.view(shape), best.high.view(shape), chosen.view(shape), best.improved)


def search_one_group(
    tiles: Tiles, args: ObserverArgs, factors: Sequence[float], *, expand: float, norm: float
) -> BestFactors:
    """The best of `factors` for all values of all tiles."""
    form, first = format_of(args), next(iter(tiles))
    if first.dtype.itemsize == 2 and first.numel() >= PATTERNS:
        values, counts = distinct_values(tiles, first.dtype)
        one = search_grid_groups(
            values.unsqueeze(0), form, factors, norm=norm, expand=expand, importance=counts.unsqueeze(0)
        )
        return _for_all_groups(tiles, one.low, one.high, torch.tensor(factors)[one.step], one.improved)
    ranges = torch.tensor([range_of_values(tile) for tile in tiles]) * expand
    low, high = ranges[:, 0].amin(), ranges[:, 1].amax()
    ends = float(low), float(high)
    errors = torch.stack([shrink_errors(tile, ends, form, factors, norm=norm) for tile in tiles]).sum(0)
    best_so_far = torch.cat([torch.tensor([torch.inf], dtype=errors.dtype), errors.cummin(0).values[:-1]])
    chosen = torch.tensor(factors)[errors.argmin()]
    return _for_all_groups(tiles, low, high, chosen, (errors < best_so_far).tolist())


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
    """What values are rounded to, with scales as they are stored."""
    form = integer_format(args.num_bits, symmetric=args.symmetric)
    if is_float(args):
        form = E2M1 if args.num_bits == 4 else E4M3
    return form._replace(scale_storage=STORAGES[stored_dtype(args)])


def serves_nvfp4(tile: torch.Tensor) -> bool:
    """Whether `nvfp4_scales_of_tile` does this search."""
    return serves(tile) and tile.shape[-1] == NVFP4_GROUP


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


def _for_all_groups(
    tiles: Tiles, low: torch.Tensor, high: torch.Tensor, factor: torch.Tensor, improved: list[bool]
) -> BestFactors:
    shape = tiles.groups
    return BestFactors(low.expand(shape), high.expand(shape), factor.expand(shape), improved)
