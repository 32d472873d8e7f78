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

from vexport.numerics.constants import E2M1_MAX, E4M3_EPS, E4M3_MAX
from vexport.observers.args import ObserverArgs
from vexport.observers.kernels.tiles import (
    BestFactors,
    extremes_of_tile,
    nvfp4_scales_of_tile,
    range_of_tile,
    search_one_group,
    search_tile,
    serves_grid,
    serves_nvfp4,
)
from vexport.observers.qparams import fake_quantize, round_to_e2m1, scale_and_zero_point
from vexport.observers.tiles import Tiles
from vexport.types.observer_names import SearchOptions

Range = tuple[torch.Tensor, torch.Tensor]
# The peer computes candidates in bf16: its range may be off by three roundings of 2**-8 each. Candidates
# reach so much further at both ends that whatever it could choose is among them.
CANDIDATE_SLACK = 2.0**-6
# Rows that global scales are compared by.
SAMPLED_ROWS = 64


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
    least, most = min(search.factors) * search.expand, max(search.factors) * search.expand
    slack = least * (1 - CANDIDATE_SLACK), most * (1 + CANDIDATE_SLACK)
    weight = None if importance is None else importance[0]
    if serves_nvfp4(tile):
        return nvfp4_scales_of_tile(tile[0], global_scale, slack, search.norm, weight)
    return _best_block_scale(tile[0].float(), global_scale, (least, most), search.norm, weight).float()


def nvfp4_error(
    tiles: Tiles, global_scale: torch.Tensor, search: Search, importance: torch.Tensor | None
) -> float:
    """The error that the best block scales leave with this global scale, in rows spread over a weight."""
    step = -(-tiles.groups[0] // SAMPLED_ROWS)
    weight, total = None if importance is None else importance[0], 0.0
    for _, tile in tiles.by_rows():
        rows = tile[:, ::step].contiguous()
        scales = _block_scales(rows, global_scale, search, importance).float()
        total += float(block_errors(rows[0].float(), scales / global_scale, search.norm, weight).sum())
    return total


def _best_block_scale(
    values: torch.Tensor,
    global_scale: torch.Tensor,
    bounds: tuple[float, float],
    norm: float,
    importance: torch.Tensor | None,
) -> torch.Tensor:
    """The best e4m3 scale of each group of one tile (..., group_size), larger scales first: float8_e4m3fn.

    A smaller scale clips the largest value further. Once the error of that value alone exceeds the best
    error, in every group, no smaller scale can be better and the search ends.
    """
    absmax, where = values.abs().max(-1)
    weight = (
        importance.expand_as(values).gather(-1, where.unsqueeze(-1)).squeeze(-1)
        if importance is not None
        else 1.0
    )
    first, last = candidate_codes(absmax, global_scale, bounds)
    best, least = _nonzero(first), torch.full_like(absmax, torch.inf)
    for offset in range(int((first - last).max()) + 1):
        scale = _nonzero(first - offset)
        step = scale / global_scale
        clipped = weight * (absmax - E2M1_MAX * step).clamp_(min=0).pow_(norm)
        if offset and bool((clipped >= least).all()):
            break
        error = block_errors(values, step, norm, importance)
        better = (error < least) & (first - offset >= last)
        least, best = torch.where(better, error, least), torch.where(better, scale, best)
    return torch.where(absmax > 0, best, E4M3_EPS).to(torch.float8_e4m3fn)


def candidate_codes(
    absmax: torch.Tensor, global_scale: torch.Tensor, bounds: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest, smallest) e4m3 bit pattern worth trying for each group, int32.

    Bit patterns of positive e4m3 numbers are consecutive integers in the order of their values.
    """
    scale = absmax * global_scale / E2M1_MAX
    largest = _e4m3_code(scale * (bounds[1] * (1 + CANDIDATE_SLACK)))
    return largest.clamp_(min=1), _e4m3_code(scale * (bounds[0] * (1 - CANDIDATE_SLACK)))


def block_errors(
    values: torch.Tensor, step: torch.Tensor, norm: float, importance: torch.Tensor | None
) -> torch.Tensor:
    """Error of each group of `values` (..., group_size), float32, in e2m1 with a `step` (...) each."""
    steps = step.unsqueeze(-1)
    error = round_to_e2m1(values / steps).mul_(steps).sub_(values).abs_().pow_(norm)
    if importance is not None:
        error.mul_(importance)
    return error.sum(-1)


def _e4m3_code(value: torch.Tensor) -> torch.Tensor:
    return value.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)


def _nonzero(code: torch.Tensor) -> torch.Tensor:
    """The value of an e4m3 bit pattern; what would be zero is stored as the smallest step."""
    scale = code.clamp(min=0).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    return torch.where(scale == 0, E4M3_EPS, scale)
