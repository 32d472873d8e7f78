"""GPTQ: the columns of a weight are rounded one after another, each corrects the errors before it.

Source: Frantar et al. (arXiv 2210.17323); order of columns and damping as in llm-compressor's GPTQModifier.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from vexport.numerics.arithmetic import Floats
from vexport.rounding.columns import BLOCK_COLUMNS, round_block
from vexport.rounding.factor import Factor
from vexport.rounding.grid import Grid
from vexport.rounding.moments import Moments
from vexport.rounding.settings import GPTQ, Recipe

# Rows that one thread rounds at a time.
TILE_ROWS = 64


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
