"""Scale and zero point of each group of a weight, from the ranges of some rows after the other."""

from collections.abc import Iterable

import torch

from vexport.observers.args import ObserverArgs
from vexport.observers.qparams import scale_and_zero_point
from vexport.observers.search import Range
from vexport.observers.tiles import Tiles


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
