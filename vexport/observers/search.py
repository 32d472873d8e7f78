"""Searches for the range of each group whose quantization error is least.

On the CPU compiled kernels do them; these torch versions do the rest and define the meaning. Both
searches work a tile at a time and in float32. The error of a group is
`sum(importance * |dequantized - value| ** norm)` (llm-compressor, observers/mse_quant.py and imatrix.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from vexport.observers.args import ObserverArgs
from vexport.observers.kernels.tiles import (
    Factors,
    extremes_of_tile,
    joined,
    nvfp4_scales_of_tile,
    range_of_tile,
    search_tiles,
    serves_grid,
    serves_nvfp4,
)
from vexport.observers.qparams import E4M3_EPS, FP4_MAX, FP8_MAX, scale_and_zero_point
from vexport.observers.rounding import fake_quantize, round_to_e2m1
from vexport.observers.tiles import Tiles

Range = tuple[torch.Tensor, torch.Tensor]

# The peer computes candidates in bf16: its range may be off by three roundings of 2**-8 each. Candidates
# reach so much further at both ends that whatever it could choose is among them.
CANDIDATE_SLACK = 2.0**-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is searched: the observed range times `expand` times each of `factors`, in that order.

    `patience` steps without an improvement in any group end the search; 0 turns that off.
    """

    factors: tuple[float, ...]
    expand: float
    norm: float
    patience: int


def search_grid(
    tiles: Tiles, args: ObserverArgs, search: Search, importance: torch.Tensor | None = None
) -> Range:
    """The best (low, high) of each group, float32, shape qparam_shape: both ends shrunk together.

    `importance` broadcasts to a tile. The earlier of two equal candidates is kept.
    """
    if serves_grid(tiles, args, importance):
        return _search_grid_compiled(tiles, args, search, importance)
    low, high = range_of(tiles)
    low, high = low * search.expand, high * search.expand
    best = _best_factor(tiles, low, high, args, search, importance)
    return low * best, high * best


def _search_grid_compiled(
    tiles: Tiles, args: ObserverArgs, search: Search, importance: torch.Tensor | None
) -> Range:
    def chosen(factors: tuple[float, ...]) -> Factors:
        return search_tiles(
            tiles, args, factors, expand=search.expand, norm=search.norm, importance=importance
        )

    found = chosen(search.factors)
    steps = _steps_until_stop(found.improved, search.patience)
    if any(found.improved[steps:]):
        found = chosen(search.factors[:steps])
    best = torch.tensor(search.factors)[found.step.to(torch.int32)]
    return found.low * best, found.high * best


def range_of(tiles: Tiles) -> Range:
    """Minimum and maximum of each group, float32, shape qparam_shape."""
    lows, highs = [], []
    for low, high in map(range_of_tile, tiles):
        lows.append(low)
        highs.append(high)
    if tiles.shared:
        return torch.stack(lows).amin(0), torch.stack(highs).amax(0)
    return joined(lows), joined(highs)


def extremes_of(tiles: Tiles) -> Range:
    """The smallest and the largest of all values, float32, of no dimension."""
    pairs = [extremes_of_tile(tile) for tile in tiles]
    return torch.stack([low for low, _ in pairs]).amin(), torch.stack([high for _, high in pairs]).amax()


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


def _best_factor(
    tiles: Tiles,
    low: torch.Tensor,
    high: torch.Tensor,
    args: ObserverArgs,
    search: Search,
    importance: torch.Tensor | None,
) -> torch.Tensor:
    """The chosen factor of each group, 1 where no candidate has a finite error.

    Patience counts over all groups whatever the tiles, so a tile cannot stop by itself: all steps are
    tried, and once more without the late ones in the rare case that one of those was chosen.
    """
    best, improved = _try_factors(tiles, low, high, args, search, importance)
    steps = _steps_until_stop(improved, search.patience)
    if not any(improved[steps:]):
        return best
    fewer = replace(search, factors=search.factors[:steps])
    return _try_factors(tiles, low, high, args, fewer, importance)[0]


def _try_factors(
    tiles: Tiles,
    low: torch.Tensor,
    high: torch.Tensor,
    args: ObserverArgs,
    search: Search,
    importance: torch.Tensor | None,
) -> tuple[torch.Tensor, list[bool]]:
    """The best factor of each group, and for each step whether it was the best so far for any group."""
    if tiles.shared:
        errors = torch.zeros(len(search.factors), *low.shape, device=low.device)
        for tile in tiles:
            errors += grid_errors(tile, low, high, args, search, importance)
        return _least(errors, search.factors)
    best, improved, start = [], [False] * len(search.factors), 0
    for tile in tiles:
        rows = slice(start, start + tile.shape[1])
        start = rows.stop
        chosen, better = _least(
            grid_errors(tile, low[rows], high[rows], args, search, importance), search.factors
        )
        best.append(chosen)
        improved = [a or b for a, b in zip(improved, better, strict=True)]
    return torch.cat(best), improved


def _least(errors: torch.Tensor, factors: Sequence[float]) -> tuple[torch.Tensor, list[bool]]:
    best = torch.ones(errors.shape[1:], device=errors.device)
    least = torch.full(errors.shape[1:], torch.finfo(torch.float32).max, device=errors.device)
    improved = []
    for factor, error in zip(factors, errors, strict=True):
        better = error < least
        improved.append(bool(better.any()))
        least = torch.where(better, error, least)
        best.masked_fill_(better, factor)
    return best, improved


def _steps_until_stop(improved: Sequence[bool], patience: int) -> int:
    stale = 0
    for step, better in enumerate(improved):
        stale = 0 if better else stale + 1
        if patience and stale >= patience:
            return step + 1
    return len(improved)


def minmax_nvfp4(tiles: Tiles, args: ObserverArgs, global_scale: torch.Tensor) -> torch.Tensor:
    """The stored block scales of each group's range: float32 holding e4m3 values, shape qparam_shape."""
    ranges = (range_of_tile(tile) for tile in tiles)
    scales = [scale_and_zero_point(low, high, args, global_scale)[0] for low, high in ranges]
    return torch.cat([scale.to(torch.float8_e4m3fn) for scale in scales]).to(torch.float32)


def search_nvfp4(
    tiles: Iterable[torch.Tensor],
    global_scale: torch.Tensor,
    search: Search,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best stored block scale of each group: float32 holding e4m3 values, shape qparam_shape.

    A tile is (1, rows, groups, group_size) in any float dtype; `global_scale` is the shared divisor, float32
    (1,). What a block scale can be is an e4m3 number, so the few of them that lie between the last and the
    first candidate of `search` are all tried: no grid and no patience is needed. `importance` broadcasts to
    a tile.
    """
    least, most = min(search.factors) * search.expand, max(search.factors) * search.expand
    slack = least * (1 - CANDIDATE_SLACK), most * (1 + CANDIDATE_SLACK)
    weight = None if importance is None else importance[0]
    parts = [
        nvfp4_scales_of_tile(tile[0], global_scale, slack, search.norm, weight)
        if serves_nvfp4(tile)
        else _best_block_scale(tile[0].float(), global_scale, (least, most), search.norm, weight)
        for tile in tiles
    ]
    # Stored scales are a quarter of the size; concatenating those keeps the peak low.
    return torch.cat(parts).to(torch.float32)


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
        clipped = weight * (absmax - FP4_MAX * step).clamp_(min=0).pow_(norm)
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
    scale = absmax * global_scale / FP4_MAX
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
    return value.clamp(max=FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)


def _nonzero(code: torch.Tensor) -> torch.Tensor:
    """The value of an e4m3 bit pattern; what would be zero is stored as the smallest step."""
    scale = code.clamp(min=0).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    return torch.where(scale == 0, E4M3_EPS, scale)
