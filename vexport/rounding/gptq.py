"""GPTQ: the columns of a weight are rounded one after another, each corrects the errors before it.

Source: Frantar et al. (arXiv 2210.17323); order of columns and damping as in llm-compressor's GPTQModifier.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from vexport.numerics.arithmetic import Floats, round_values
from vexport.rounding.columns import BLOCK_COLUMNS, round_block
from vexport.rounding.grid import Grid

# Rows that one thread rounds at a time.
TILE_ROWS = 64
# Damping is raised tenfold so many times before a layer is rounded to nearest instead.
ATTEMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """The upper Cholesky factor of the inverse of a damped H, its columns in the order of rounding.

    `order` (columns,) are the columns by falling diagonal of H, `damping` the share of its mean that was
    added, `dead` how many columns were always zero.
    """

    upper: Floats
    order: torch.Tensor
    damping: float
    dead: int


def factorize(hessian: torch.Tensor, damping: float) -> Factor | None:
    """The factor of H (in, in); None where H is not positive definite with any damping up to 1000 times that.

    A dead column's diagonal becomes 1: nothing depends on it.
    """
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    order = torch.argsort(diagonal, descending=True, stable=True)
    mean = diagonal.sum() / max(1, int((~dead).sum()))
    ordered = hessian[order][:, order]
    for attempt in range(ATTEMPTS):
        share = damping * 10**attempt
        added = torch.where(dead, 1.0, share * mean)
        upper = _inverse_factor(ordered + torch.diag(added[order]))
        if upper is not None:
            return Factor(upper=upper, order=order, damping=share, dead=int(dead.sum()))
    return None


def _inverse_factor(hessian: torch.Tensor) -> Floats | None:
    lower, failed = torch.linalg.cholesky_ex(hessian)
    if failed:
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if failed or not bool(torch.isfinite(upper).all()):
        return None
    found: Floats = upper.contiguous().numpy()
    return found


def round_nearest(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The nearest number of the grid for every value of a weight (out, in), float32."""
    columns = weight.shape[1]
    scale, zero = (
        torch.from_numpy(values).repeat_interleave(grid.width, dim=1)[:, :columns]
        for values in (grid.scale, grid.zero)
    )
    scaled = (weight / scale + zero).clamp(float(grid.form.low), float(grid.form.high)).contiguous()
    codes = scaled.numpy().reshape(-1)
    round_values(codes, grid.form)
    return (scaled - zero) * scale


def round_columns(weight: torch.Tensor, factor: Factor, grid: Grid) -> torch.Tensor:
    """The rounded weight (out, in) float32, every value of it a number of the grid."""
    columns = weight.shape[1]
    values: Floats = weight[:, factor.order].to(torch.float32).contiguous().numpy()
    groups = (factor.order.numpy() // grid.width).astype(np.int32)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for first in range(0, columns, BLOCK_COLUMNS):
            last = min(first + BLOCK_COLUMNS, columns)
            errors = np.empty((len(values), last - first), np.float32)

            def tile(start: int, first: int = first, errors: Floats = errors) -> None:
                rows = slice(start, start + TILE_ROWS)
                scales, zeros = grid.scale[rows], grid.zero[rows]
                round_block(values[rows], factor.upper, scales, zeros, groups, grid.form, first, errors[rows])

            list(pool.map(tile, range(0, len(values), TILE_ROWS)))
            values[:, last:] -= errors @ factor.upper[first:last, last:]
    rounded = torch.empty(weight.shape, dtype=torch.float32)
    rounded[:, factor.order] = torch.from_numpy(values)
    return rounded
