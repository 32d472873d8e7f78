"""Rounding column after column, each error passed on to the columns that follow: GPTQ's inner loop.

Source: Frantar et al., GPTQ (arXiv 2210.17323), algorithm 1 with its lazy batch updates.
"""

import numpy as np
import numpy.typing as npt

from vexport.numerics.arithmetic import F32, Floats, Format, round_to
from vexport.numerics.jit import MULTIPLY_ADD, compiled, wide_vectors

# Columns whose errors are passed on together, by one matrix product, to all that follow.
BLOCK_COLUMNS = 128


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
