"""GPTQ: the columns of a weight are rounded one after another, each corrects the errors before it.

Source: Frantar et al. (arXiv 2210.17323); order of columns and damping as in llm-compressor's GPTQModifier.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vexport.numerics.arithmetic import F32, Floats, Format, round_to
from vexport.numerics.jit import MULTIPLY_ADD, compiled, wide_vectors
from vexport.rounding.grid import Grid
from vexport.rounding.moments import Moments
from vexport.rounding.settings import GPTQ, Recipe

# Rows that one thread rounds at a time.
TILE_ROWS = 64
# Columns whose errors are passed on together, by one matrix product, to all that follow.
BLOCK_COLUMNS = 128
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
    """U, upper, with U^T U = H^-1: the inverse of the Cholesky factor R, upper, with R R^T = H."""
    lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
    if failed:
        return None
    eye = torch.eye(len(hessian), device=hessian.device)
    upper = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
    if not bool(torch.isfinite(upper).all()):
        return None
    found: Floats = upper.contiguous().numpy()
    return found


@compiled(fastmath=MULTIPLY_ADD)
def pass_on(values: Floats, error: np.float32, factor: Floats) -> None:
    """Subtract `error` times a row of the factor from the columns that follow."""
    wide_vectors()
    for i in range(values.size):
        values[i] -= F32(error * factor[i])


@compiled()
def round_block(
    weight: Floats,
    factor: Floats,
    scales: Floats,
    zeros: Floats,
    groups: npt.NDArray[np.int32],
    form: Format,
    first: int,
    errors: Floats,
) -> None:
    """Round some columns of some rows in place, from `first` on, as many as `errors` has.

    `weight` (rows, columns); `factor` (columns, columns) is the upper Cholesky factor of the inverse of H;
    `scales` and `zeros` (rows, groups), of which column c has number `groups[c]`; `errors` (rows, some) is
    what the columns behind them have to take in.
    """
    last = first + errors.shape[1]
    for row in range(weight.shape[0]):
        values = weight[row]
        for column in range(first, last):
            scale, zero = scales[row, groups[column]], zeros[row, groups[column]]
            scaled = min(max(F32(F32(values[column] / scale) + zero), form.low), form.high)
            rounded = F32(F32(round_to(scaled, form) - zero) * scale)
            error = F32(F32(values[column] - rounded) / factor[column, column])
            values[column] = rounded
            errors[row, column - first] = error
            pass_on(values[column + 1 : last], error, factor[column, column + 1 : last])


class Gptq:
    """The weights themselves, column after column."""

    def recipes(self, *, layers: int, held_out: int) -> Sequence[Recipe]:
        """llm-compressor's damping alone."""
        return (GPTQ,)

    def target(self, weight: torch.Tensor, moments: Moments, recipe: Recipe, factor: Factor) -> torch.Tensor:
        """The weights as they are."""
        return weight

    def round(self, target: torch.Tensor, factor: Factor, grid: Grid) -> torch.Tensor:
        """Columns, each of which corrects the errors before it."""
        return round_columns(target, factor, grid)


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
