"""The numbers that a weight may become: its format's, in units of each group's scale."""

from dataclasses import dataclass

import numpy as np
import torch

from vexport.formats.arguments import QuantArgs
from vexport.formats.packing.base import Scales
from vexport.numerics.arithmetic import E2M1, E4M3, Floats, Format, integer_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """(code - zero) * scale for every code of `form`; `scale` and `zero` (rows, groups) float32.

    `width` is how many columns have one scale.
    """

    form: Format
    scale: Floats
    zero: Floats
    width: int


def number_format(args: QuantArgs) -> Format:
    """The numbers of a weight in units of its scale."""
    if args.is_float:
        return E2M1 if args.num_bits == 4 else E4M3
    return integer_format(args.num_bits, symmetric=args.symmetric)


def grid_of(args: QuantArgs, scales: Scales, shape: tuple[int, int], stored: torch.dtype) -> Grid:
    """The grid of a weight (out, in), whose scales are stored in the dtype `stored`."""
    rows, columns = shape
    high, width = args.block or (1, args.group or columns)
    groups = -(-columns // width)
    scale = torch.from_numpy(scales.scale).to(stored).to(torch.float32)
    if scales.global_scale is not None:
        scale = scale / torch.from_numpy(scales.global_scale)
    return Grid(
        form=number_format(args),
        scale=_spread(scale.numpy(), rows, groups, high),
        zero=_spread(scales.zero_point, rows, groups, high),
        width=width,
    )


def stack(grids: "list[Grid]") -> Grid:
    """The grid of several weights of one scheme and one input, one below the other."""
    first = grids[0]
    return Grid(
        form=first.form,
        scale=np.concatenate([grid.scale for grid in grids]),
        zero=np.concatenate([grid.zero for grid in grids]),
        width=first.width,
    )


def _spread(values: Floats, rows: int, groups: int, high: int) -> Floats:
    """(rows, groups) of a value a block of rows, a row, or one for all."""
    if values.size == 1:
        return np.full((rows, groups), values.reshape(()), np.float32)
    blocks = values.reshape(-1, groups)
    spread: Floats = np.ascontiguousarray(np.repeat(blocks, high, axis=0)[:rows], dtype=np.float32)
    return spread
