"""Searches for the NVFP4 block scales with the least error, among those that can be stored.

On the CPU a compiled kernel does it; this torch version does the rest and defines the meaning.
"""

import torch

from vexport.numerics.constants import E2M1_MAX, E4M3_EPS, E4M3_MAX
from vexport.observers.kernels.tiles import nvfp4_scales_of_tile, serves_nvfp4
from vexport.observers.rounding import round_to_e2m1
from vexport.observers.search import Search
from vexport.observers.tiles import Tiles

# The peer computes candidates in bf16: its range may be off by three roundings of 2**-8 each. Candidates
# reach so much further at both ends that whatever it could choose is among them.
CANDIDATE_SLACK = 2.0**-6


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
    least, most = min(search.factors) * search.expand, max(search.factors) * search.expand
    slack = least * (1 - CANDIDATE_SLACK), most * (1 + CANDIDATE_SLACK)
    weight = None if importance is None else importance[0]
    best = torch.empty(tiles.groups, device=tiles.device)
    for rows, tile in tiles.by_rows():
        best[rows] = (
            nvfp4_scales_of_tile(tile[0], global_scale, slack, search.norm, weight)
            if serves_nvfp4(tile)
            else _best_block_scale(tile[0].float(), global_scale, (least, most), search.norm, weight)
        )
    return best


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
