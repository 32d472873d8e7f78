"""GPTQ: round the columns of a weight one after another, and correct later columns for the errors.

A refit first corrects the weight for the difference between its inputs in the quantized model and
in the source. It then applies GPTQ. The grid consists of the values that a quantized weight can
have: the numbers of its format times each group's scale. H is the sum of x x^T over the input
vectors x. All tensors stay on the device of H. On the CPU compiled kernels round the columns.

Source: Frantar et al. (arXiv 2210.17323). The order of columns and the damping are the same as in
llm-compressor's GPTQModifier.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import reduce
from importlib.util import find_spec
from shutil import which

import numpy as np
import numpy.typing as npt
import torch

from vexport.formats.arguments import QuantArgs, input_bits
from vexport.formats.packing.base import Scales
from vexport.formats.plan import FusionGroup
from vexport.numerics import tensors
from vexport.numerics.arithmetic import Floats, round_to
from vexport.numerics.jit import MULTIPLY_ADD, compiled, wide_vectors
from vexport.numerics.number_formats import F32, NumberFormat
from vexport.numerics.products import product
from vexport.numerics.tensors import TensorFormat
from vexport.observers.search import format_of
from vexport.quantize.moments import Moments

# Rows rounded at once by one thread.
TILE_ROWS = 64
# Columns per block. A single matrix product corrects all later columns for the errors of a block.
BLOCK_COLUMNS = 128
# Number of columns of a matrix that LAPACK factorizes without splitting it.
LAPACK_COLUMNS = 256
# Number of attempts to factorize H. Each attempt uses ten times the damping of the attempt before
# it. If all attempts fail, the weight is rounded to nearest.
DAMPING_ATTEMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Strength:
    """Strength of a refit. With `strength` 0, a refit is GPTQ.

    `ridge` times the mean of H's diagonal is added to the diagonal. If `weighs_tokens` is set, each
    token is weighted by the gradient of the layer's output. Otherwise all tokens have equal
    weights.
    """

    strength: float
    ridge: float
    weighs_tokens: bool = False


# llm-compressor's damping.
GPTQ = Strength(strength=0.0, ridge=0.01)
# Strength of a refit for each number of input bits. These strengths gave the smallest KL on
# SmolLM2-135M.
REFIT_STRENGTHS = {
    16: Strength(strength=0.5, ridge=0.1, weighs_tokens=True),
    8: Strength(strength=0.5, ridge=0.1, weighs_tokens=True),
    4: Strength(strength=0.25, ridge=0.3),
}


def strength_of(group: FusionGroup) -> Strength:
    """Return the strength of a group's refit, or `GPTQ` for a group with another rounding.

    The rule of the group takes precedence over `REFIT_STRENGTHS`.
    """
    if group.rounding != "refit":
        return GPTQ
    settings = REFIT_STRENGTHS[input_bits(group.scheme.args)]
    if group.strength is not None:
        settings = replace(settings, strength=group.strength)
    return settings if group.ridge is None else replace(settings, ridge=group.ridge)


def weighs_tokens(groups: Iterable[FusionGroup]) -> bool:
    """Return True if tokens are weighted by gradients when a group is rounded."""
    return any(strength_of(group).weighs_tokens for group in groups if group.rounding != "nearest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Numbers (code - zero) * scale for all codes of `form`.

    `scale` and `zero` (rows, groups) are float32. `width` columns share a scale.
    """

    form: NumberFormat
    scale: torch.Tensor
    zero: torch.Tensor
    width: int

    def rows(self, rows: torch.Tensor) -> "Grid":
        """Return the grid of some rows."""
        return replace(self, scale=self.scale[rows], zero=self.zero[rows])


def grid_of(args: QuantArgs, scales: Scales, shape: tuple[int, int], stored: torch.dtype) -> Grid:
    """Return the grid of a weight (out, in) with scales stored in the dtype `stored`."""
    rows, columns = shape
    height, width = args.block or (1, args.group or columns)
    groups = -(-columns // width)
    scale = torch.from_numpy(scales.scale).to(stored).to(torch.float32)
    if scales.global_scale is not None:
        scale = scale / torch.from_numpy(scales.global_scale)
    return Grid(
        form=format_of(args),
        scale=_per_row(scale, rows, groups, height),
        zero=_per_row(torch.from_numpy(scales.zero_point), rows, groups, height),
        width=width,
    )


def stack(grids: "list[Grid]", device: torch.device) -> Grid:
    """Return the grid of several stacked weights with the same scheme and the same input."""
    scale = torch.cat([grid.scale for grid in grids])
    zero = torch.cat([grid.zero for grid in grids])
    return replace(grids[0], scale=scale.to(device), zero=zero.to(device))


def _per_row(values: torch.Tensor, rows: int, groups: int, height: int) -> torch.Tensor:
    """Expand scales or zero points to (rows, groups).

    `values` has a value for the whole weight, or a row of values for each `height` rows.
    """
    if values.numel() == 1:
        return values.reshape(1, 1).repeat(rows, groups)
    return values.reshape(-1, groups).repeat_interleave(height, dim=0)[:rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """Upper Cholesky factor of the inverse of a damped H, in the order of rounding.

    `order` (columns,) holds the columns, sorted by decreasing diagonal of H. `dead` is the number
    of input columns that were always zero. `damping` times the mean of the other columns' diagonal
    values was added to the diagonal.
    """

    upper: torch.Tensor
    order: torch.Tensor
    damping: float
    dead: int


def factorize(hessian: torch.Tensor, damping: float) -> Factor | None:
    """Return the factor of H (in, in).

    Returns None if H is not positive definite even with 1000 times this damping. The diagonal of a
    dead column is set to 1, because no output depends on this column.
    """
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    order = torch.argsort(diagonal, descending=True, stable=True)
    mean = diagonal.sum() / max(1, int((~dead).sum()))
    last_first = order.flip(0)
    ordered = hessian.index_select(0, last_first).index_select(1, last_first)
    for attempt in range(DAMPING_ATTEMPTS):
        share = damping * 10**attempt
        damped = ordered.clone()
        damped.diagonal().add_(torch.where(dead, 1.0, share * mean)[last_first])
        lower = _inverse_of_cholesky(damped)
        if bool(torch.isfinite(lower.sum())):
            upper = lower.flip(0, 1).contiguous()
            return Factor(upper=upper, order=order, damping=share, dead=int(dead.sum()))
    return None


def _inverse_of_cholesky(hessian: torch.Tensor) -> torch.Tensor:
    """Return L^-1, lower, with L L^T = H. Its sum is NaN if H is not positive definite.

    On a CPU a large matrix is split into halves, so that nearly all operations are products of
    matrices. These have a higher rate than LAPACK's routines.
    """
    size = len(hessian)
    if size <= LAPACK_COLUMNS or hessian.device.type != "cpu":
        lower, failed = torch.linalg.cholesky_ex(hessian)
        eye = torch.eye(size, device=hessian.device)
        solved: torch.Tensor = torch.linalg.solve_triangular(lower, eye, upper=False)
        return torch.where(failed == 0, solved, torch.nan)
    half = size // 2
    first = _inverse_of_cholesky(hessian[:half, :half])
    between = product(hessian[half:, :half], first.T)
    second = _inverse_of_cholesky(hessian[half:, half:] - product(between, between.T))
    inverse = torch.zeros_like(hessian)
    inverse[:half, :half] = first
    inverse[half:, half:] = second
    inverse[half:, :half] = product(product(second, between), first).neg_()
    return inverse


@compiled()
def round_column(
    values: Floats,
    scales: Floats,
    zeros: Floats,
    form: NumberFormat,
    pivot: np.float32,
    errors: Floats,
) -> None:
    """Round a column in place. `errors` receives the errors, divided by `pivot`."""
    wide_vectors()
    for row in range(values.size):
        scale, zero = scales[row], zeros[row]
        scaled = min(max(F32(F32(values[row] / scale) + zero), form.low), form.high)
        rounded = F32(F32(round_to(scaled, form) - zero) * scale)
        errors[row] = F32(F32(values[row] - rounded) / pivot)
        values[row] = rounded


@compiled(fastmath=MULTIPLY_ADD)
def subtract_errors(columns: Floats, errors: Floats, factor: Floats) -> None:
    """Subtract from each of the columns (columns, rows) the errors times its value of `factor`."""
    wide_vectors()
    for column in range(factor.size):
        values = columns[column]
        multiple = factor[column]
        for row in range(errors.size):
            values[row] -= F32(errors[row] * multiple)


@compiled()
def round_tile(
    weight: Floats,
    factor: Floats,
    scales: Floats,
    zeros: Floats,
    groups: npt.NDArray[np.int32],
    form: NumberFormat,
    first: int,
    errors: Floats,
) -> None:
    """Round some columns of a few rows, as `round_block` does.

    The columns of a row wait for each other. Vectors of the processor therefore hold columns.
    """
    rows, count = errors.shape
    last = first + count
    block = np.empty((count, rows), F32)
    for row in range(rows):
        for column in range(count):
            block[column, row] = weight[row, first + column]
    wrong = np.empty((count, rows), F32)
    scales_of_group, zeros_of_group = scales.T.copy(), zeros.T.copy()
    for place in range(count):
        column = first + place
        group = groups[column]
        pivot = factor[column, column]
        round_column(
            block[place], scales_of_group[group], zeros_of_group[group], form, pivot, wrong[place]
        )
        subtract_errors(block[place + 1 :], wrong[place], factor[column, column + 1 : last])
    for row in range(rows):
        for column in range(count):
            weight[row, first + column] = block[column, row]
            errors[row, column] = wrong[column, row]


@compiled()
def round_block(
    weight: Floats,
    factor: Floats,
    scales: Floats,
    zeros: Floats,
    groups: npt.NDArray[np.int32],
    form: NumberFormat,
    first: int,
    errors: Floats,
) -> None:
    """Round some columns of some rows in place, beginning at the column `first`.

    `weight` is (rows, columns). `factor` (columns, columns) is the upper Cholesky factor of the
    inverse of H. `scales` and `zeros` are (rows, groups), and column c belongs to group
    `groups[c]`. `errors` (rows, count) determines the number of rounded columns. It receives the
    errors for which later columns must be corrected.
    """
    for start in range(0, weight.shape[0], TILE_ROWS):
        rows = slice(start, start + TILE_ROWS)
        round_tile(
            weight[rows], factor, scales[rows], zeros[rows], groups, form, first, errors[rows]
        )


def refit(
    weight: torch.Tensor, moments: Moments, factor: Factor, *, strength: float
) -> torch.Tensor:
    """Return the weight (out, in) float32, corrected for the inputs of the quantized model.

    `factor` is the factor of the moments' damped H.
    """
    inverse = (factor.upper.T, factor.upper)
    if moments.targets is not None:
        errors = moments.targets.T - product(weight, moments.hessian)
        correction = reduce(product, inverse, errors.index_select(1, factor.order))
    else:
        assert moments.drift is not None
        drift = moments.drift.index_select(0, factor.order).T
        # A weight with more rows than columns comes last, because the products then have fewer
        # rows.
        correction = (
            product(weight, reduce(product, inverse, drift))
            if len(weight) > len(drift)
            else reduce(product, (drift, *inverse), weight)
        )
    return torch.add(weight, _natural_order(correction, factor), alpha=strength)


def _natural_order(values: torch.Tensor, factor: Factor) -> torch.Tensor:
    """Return columns in the order of rounding (out, in) as the weight's columns."""
    return values.index_select(1, torch.argsort(factor.order))


def round_nearest(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the nearest number of the grid for every value of a weight (out, in), float32."""
    columns = weight.shape[1]
    scale, zero = (
        values.repeat_interleave(grid.width, dim=1)[:, :columns]
        for values in (grid.scale, grid.zero)
    )
    return _nearest(weight, scale, zero, grid.form)


def _nearest(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, form: NumberFormat
) -> torch.Tensor:
    """Round values to the nearest numbers of the grid, with the same result as `round_block`."""
    rounded = tensors.round_to(values / scale + zero, TensorFormat.of(form))
    return rounded.sub_(zero).mul_(scale)


def round_columns(weight: torch.Tensor, factor: Factor, grid: Grid) -> torch.Tensor:
    """Return the rounded weight (out, in) float32. All of its values are numbers of the grid."""
    values = weight.to(torch.float32).index_select(1, factor.order)
    (round_compiled if values.device.type == "cpu" else round_blocks)(values, factor, grid)
    return _natural_order(values, factor)


def round_blocks(values: torch.Tensor, factor: Factor, grid: Grid) -> None:
    """Round the ordered columns in place with torch, on any device.

    No step waits for a result on the host.
    """
    groups = factor.order // grid.width
    for first in range(0, values.shape[1], BLOCK_COLUMNS):
        columns = slice(first, first + BLOCK_COLUMNS)
        block = values[:, columns]
        upper = factor.upper[columns]
        factor_rows = upper[:, columns]
        groups_of_block = groups[columns]
        scale = grid.scale[:, groups_of_block]
        zero = grid.zero[:, groups_of_block]
        errors = torch.empty_like(block)
        for column in range(block.shape[1]):
            part = slice(column, column + 1)
            rounded = _nearest(block[:, part], scale[:, part], zero[:, part], grid.form)
            torch.div(block[:, part] - rounded, factor_rows[part, part], out=errors[:, part])
            block[:, column + 1 :].addmm_(
                errors[:, part], factor_rows[part, column + 1 :], alpha=-1
            )
            block[:, part] = rounded
        values[:, first + BLOCK_COLUMNS :].addmm_(
            errors, upper[:, first + BLOCK_COLUMNS :], alpha=-1
        )


def has_triton() -> bool:
    """Return True if triton is installed, and a C compiler with which it builds its launcher."""
    has_compiler = "CC" in os.environ or any(map(which, ("clang", "gcc", "cc")))
    return has_compiler and find_spec("triton") is not None


def round_on_device(values: torch.Tensor, factor: Factor, grid: Grid) -> None:
    """Round the ordered columns in place with a Triton kernel, or else like `round_blocks`.

    The kernel needs triton and a C compiler. It has never run on a GPU, so `round_columns` does not
    use it.
    """
    if not has_triton():
        round_blocks(values, factor, grid)
        return
    from vexport.quantize.tile_kernel import round_tiles  # triton may be missing

    round_tiles(values, factor, grid)


def round_compiled(weight: torch.Tensor, factor: Factor, grid: Grid) -> None:
    """Round the ordered columns in place, by a compiled kernel on all cores of the CPU."""
    columns, upper, values = weight.shape[1], factor.upper.numpy(), weight.numpy()
    scale, zero = grid.scale.contiguous().numpy(), grid.zero.contiguous().numpy()
    groups = (factor.order.numpy() // grid.width).astype(np.int32)
    threads = len(os.sched_getaffinity(0))
    rows_of_thread = -(-len(values) // threads)
    errors_of_rows = np.empty((len(values), BLOCK_COLUMNS), np.float32)
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, columns, BLOCK_COLUMNS):
            last = min(first + BLOCK_COLUMNS, columns)
            errors = errors_of_rows[:, : last - first]

            def part(start: int, first: int = first, errors: Floats = errors) -> None:
                rows = slice(start, start + rows_of_thread)
                round_block(
                    values[rows],
                    upper,
                    scale[rows],
                    zero[rows],
                    groups,
                    grid.form,
                    first,
                    errors[rows],
                )

            list(pool.map(part, range(0, len(values), rows_of_thread)))
            values[:, last:] -= errors @ upper[first:last, last:]
