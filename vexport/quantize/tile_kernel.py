"""Round blocks of columns on a GPU with a Triton kernel. Needs triton and a C compiler.

`round_blocks` starts about fifteen kernels for each column. Here, a program rounds a tile of rows:
it keeps a block of columns in registers, and writes the errors for the product that corrects the
later columns. The arithmetic is the same as in `round_block` of `vexport.quantize.gptq`.

The kernel has run only in Triton's interpreter, never on a GPU. `quantize` does not use it yet.
"""

import torch
import triton
import triton.language as tl

from vexport.numerics.tensors import TensorFormat
from vexport.quantize.gptq import BLOCK_COLUMNS, Factor, Grid

# Rows rounded by one program.
TILE_ROWS = 16


@triton.jit  # type: ignore[untyped-decorator]
def round_tile(  # type: ignore[no-untyped-def]
    values,
    errors,
    upper,
    scales,
    zeros,
    groups,
    first,
    count,
    rows,
    columns,
    groups_of_row,
    low: tl.constexpr,
    high: tl.constexpr,
    mask: tl.constexpr,
    floor: tl.constexpr,
    rounder: tl.constexpr,
    tile_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Round `count` columns of a tile of rows in place, beginning at the column `first`.

    `values` is (rows, columns), `errors` (block_columns, rows), `upper` (columns, columns), and
    `scales` and `zeros` are (rows, groups_of_row). `groups` (columns,) has the group of a column.
    """
    # Offsets have 64 bits, because a weight may have more than 2**31 values.
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    place = tl.arange(0, block_columns)
    is_row = row < rows
    is_place = place < count
    is_inside = is_row[:, None] & is_place[None, :]
    block_start = values + row[:, None] * columns + first + place[None, :]
    block = tl.load(block_start, mask=is_inside, other=0.0)
    for number in range(count):
        column = (first + number).to(tl.int64)
        group = tl.load(groups + column)
        scale = tl.load(scales + row * groups_of_row + group, mask=is_row, other=1.0)
        zero = tl.load(zeros + row * groups_of_row + group, mask=is_row, other=0.0)
        factor = tl.load(upper + column * columns + first + place, mask=is_place, other=0.0)
        diagonal = tl.load(upper + column * columns + column)
        is_current = (place == number)[None, :]
        value = tl.sum(tl.where(is_current, block, 0.0), 1)
        scaled = tl.div_rn(value, scale) + zero
        scaled = tl.where(scaled < low, low, scaled)  # NaN stays NaN
        scaled = tl.where(scaled > high, high, scaled)
        exponent = tl.maximum(scaled.to(tl.int32, bitcast=True) & mask, floor)
        shift = (exponent + rounder).to(tl.float32, bitcast=True)
        rounded = (((scaled + shift) - shift) - zero) * scale
        error = tl.div_rn(value - rounded, diagonal)
        tl.store(errors + number * rows + row, error, mask=is_row)
        corrected = tl.fma(-error[:, None], factor[None, :], block)
        block = tl.where((place > number)[None, :], corrected, block)
        block = tl.where(is_current, rounded[:, None], block)
    tl.store(block_start, block, mask=is_inside)


def round_tiles(values: torch.Tensor, factor: Factor, grid: Grid) -> None:
    """Round the ordered columns in place. No step waits for a result on the host."""
    rows, columns = values.shape
    groups = (factor.order // grid.width).to(torch.int32)
    scale = grid.scale.contiguous()
    zero = grid.zero.contiguous()
    form = TensorFormat.of(grid.form)
    errors = torch.empty(BLOCK_COLUMNS, rows, device=values.device)
    for first in range(0, columns, BLOCK_COLUMNS):
        last = min(first + BLOCK_COLUMNS, columns)
        # Products and sums are fused only where the kernel says so, as on the CPU.
        round_tile[(triton.cdiv(rows, TILE_ROWS),)](
            values,
            errors,
            factor.upper,
            scale,
            zero,
            groups,
            first,
            last - first,
            rows,
            columns,
            scale.shape[1],
            low=form.low,
            high=form.high,
            mask=form.mask,
            floor=form.floor,
            rounder=form.rounder,
            tile_rows=TILE_ROWS,
            block_columns=BLOCK_COLUMNS,
            enable_fp_fusion=False,
        )
        values[:, last:].addmm_(errors[: last - first].T, factor.upper[first:last, last:], alpha=-1)
