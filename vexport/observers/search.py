"""Searches for the range of each group whose quantization error is least.

On the CPU compiled kernels do them; these torch versions do the rest and define the meaning. They work a
tile at a time and in float32. The error of a group is `sum(importance * |dequantized - value| ** norm)`
(llm-compressor, observers/mse_quant.py and imatrix.py).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch

from vexport.observers.args import ObserverArgs
from vexport.observers.kernels.tiles import (
    BestFactors,
    extremes_of_tile,
    range_of_tile,
    search_one_group,
    search_tile,
    serves_grid,
)
from vexport.observers.qparams import scale_and_zero_point
from vexport.observers.rounding import fake_quantize
from vexport.observers.tiles import Tiles
from vexport.types.observer_options import SearchOptions

Range = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is searched: the observed range times `expand` times each of `factors`, in that order.

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
    if not tiles.shared:
        return _together(ranges_of_rows(tiles), tiles)
    lows, highs = zip(*map(range_of_tile, tiles), strict=True)
    return reduce(torch.minimum, lows), reduce(torch.maximum, highs)


def ranges_of_rows(tiles: Tiles) -> Iterator[tuple[slice, Range]]:
    """The same for some rows of qparam_shape after the other, where tiles are not shared."""
    for rows, tile in tiles.by_rows():
        yield rows, range_of_tile(tile)


def extremes_of(tiles: Tiles) -> Range:
    """The smallest and the largest of all values, float32, of no dimension."""
    pairs = [extremes_of_tile(tile) for tile in tiles]
    return torch.stack([low for low, _ in pairs]).amin(), torch.stack([high for _, high in pairs]).amax()


def search_grid(
    tiles: Tiles, args: ObserverArgs, search: Search, importance: torch.Tensor | None = None
) -> Range:
    """The best (low, high) of each group, float32, shape qparam_shape: both ends shrunk together.

    `importance` broadcasts to a tile. The earlier of two equal candidates is kept.
    """
    if not tiles.shared:
        return _together(search_rows(tiles, args, search, importance), tiles)
    found = _search_shared(tiles, args, search, importance)
    shorter = _within_patience(search, found.improved)
    if shorter != search:
        found = _search_shared(tiles, args, shorter, importance)
    return found.low * found.factor, found.high * found.factor


def search_rows(
    tiles: Tiles, args: ObserverArgs, search: Search, importance: torch.Tensor | None
) -> Iterator[tuple[slice, Range]]:
    """The same for some rows of qparam_shape after the other, where tiles are not shared.

    Patience counts over all groups whatever the tiles, so a tile cannot stop by itself: all steps are
    tried, and once more without the late ones in the rare case that one of those was chosen. All rows come
    again then.
    """
    improved = [False] * len(search.factors)
    for rows, tile in tiles.by_rows():
        found = _search_tile(tile, args, search, importance)
        yield rows, (found.low * found.factor, found.high * found.factor)
        improved = [a or b for a, b in zip(improved, found.improved, strict=True)]
    shorter = _within_patience(search, improved)
    if shorter != search:
        yield from search_rows(tiles, args, shorter, importance)


def grid_errors(
    tile: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    args: ObserverArgs,
    search: Search,
    importance: torch.Tensor | None,
) -> torch.Tensor:
    """Error of every candidate on one tile: float32, (steps, *qparam_shape).

    `tile` is (num_observations, *qparam_shape, group_size) in any float dtype; [low, high], of shape
    qparam_shape, is the range that the factors shrink.
    """
    values = tile.float()
    errors = torch.empty(len(search.factors), *low.shape, device=low.device)
    for step, factor in enumerate(search.factors):
        scale, zero_point = scale_and_zero_point(low * factor, high * factor, args, None)
        steps, zeros = scale.unsqueeze(-1), zero_point.to(torch.float32).unsqueeze(-1)
        error = fake_quantize(values, steps, zeros, args).sub_(values).abs_().pow_(search.norm)
        if importance is not None:
            error.mul_(importance)
        errors[step] = error.sum((0, -1))
    return errors


def _search_tile(
    tile: torch.Tensor, args: ObserverArgs, search: Search, importance: torch.Tensor | None
) -> BestFactors:
    if serves_grid(tile, args):
        return search_tile(
            tile, args, search.factors, expand=search.expand, norm=search.norm, importance=importance
        )
    low, high = (end * search.expand for end in range_of_tile(tile))
    errors = grid_errors(tile, low, high, args, search, importance)
    return _least(errors, low, high, search.factors)


def _search_shared(
    tiles: Tiles, args: ObserverArgs, search: Search, importance: torch.Tensor | None
) -> BestFactors:
    one_group = math.prod(tiles.groups) == 1 and importance is None
    if one_group and serves_grid(next(iter(tiles)), args):
        return search_one_group(tiles, args, search.factors, expand=search.expand, norm=search.norm)
    low, high = (end * search.expand for end in range_of(tiles))
    errors = torch.zeros(len(search.factors), *low.shape, device=low.device)
    for tile in tiles:
        errors += grid_errors(tile, low, high, args, search, importance)
    return _least(errors, low, high, search.factors)


def _least(
    errors: torch.Tensor, low: torch.Tensor, high: torch.Tensor, factors: Sequence[float]
) -> BestFactors:
    """The first factor with the least error, 1 where none has a finite error."""
    best = torch.ones(errors.shape[1:], device=errors.device)
    least = torch.full(errors.shape[1:], torch.finfo(torch.float32).max, device=errors.device)
    improved = []
    for factor, error in zip(factors, errors, strict=True):
        better = error < least
        improved.append(bool(better.any()))
        least = torch.where(better, error, least)
        best.masked_fill_(better, factor)
    return BestFactors(low, high, best, improved)


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
    for rows, found in ranges:
        low[rows], high[rows] = found
    return low, high
