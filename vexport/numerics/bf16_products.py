"""Products of bf16 matrices whose sums are float32, for CPUs with AVX-512 BF16.

torch has products of bf16 matrices only with sums in bf16. In float32 it converts operands to
float32 and back, and reaches half of the rate (one thread of an AMD Zen 5 CPU, X^T X of 512 x 1,536
values: 8.0 ms in float32, 5.3 ms in bf16, 2.8 ms here, because only the lower half is computed).
"""

from collections.abc import Callable, Sequence
from typing import cast

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.typing import Context, Signature
from numba.extending import intrinsic

from vexport.numerics.arithmetic import Floats
from vexport.numerics.cpu import bf16_units
from vexport.numerics.jit import compiled, wide_vectors
from vexport.numerics.number_formats import F32, I32

# A block of sums stays in the processor's registers: ROWS rows of VECTORS vectors.
ROWS = 8
LANES = 16
VECTORS = 3
COLUMNS = VECTORS * LANES
# Tokens per pass. The operands of a block then fit into the second-level cache.
TOKENS = 512

# Pairs of bf16 values of two successive tokens, (panels, pairs, columns of a panel).
Panels = npt.NDArray[np.int32]
Bits = npt.NDArray[np.uint16]


def compiles_bf16_products() -> bool:
    """Return True if this CPU has the instructions, and numba compiles for this CPU with them."""
    config = numba.config
    for_this_cpu = config.ENABLE_AVX and not config.CPU_NAME and not config.CPU_FEATURES
    return bool(for_this_cpu) and bf16_units() == "avx512"


def add_bf16_product(
    sums: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, alpha: float, lower: bool
) -> None:
    """Add to `sums`, like `products.add_product`, on a CPU with AVX-512 BF16.

    `first` and `second` are bf16, and `sums` is contiguous.
    """
    if alpha == 1.0:
        _add_product(sums.numpy(), _bits(first), _bits(second), lower)
        return
    added = torch.zeros_like(sums)
    _add_product(added.numpy(), _bits(first), _bits(second), lower)
    sums.add_(added, alpha=alpha)


def _bits(states: torch.Tensor) -> Bits:
    return states.contiguous().view(torch.int16).numpy().view(np.uint16)


@compiled(parallel=True)
def _add_product(sums: Floats, first: Bits, second: Bits, lower: bool) -> None:
    rows, columns = sums.shape
    row_panels = -(-rows // ROWS)
    column_panels = -(-columns // COLUMNS)
    for start in range(0, len(first), TOKENS):
        some_first, some_second = first[start : start + TOKENS], second[start : start + TOKENS]
        pairs = (len(some_first) + 1) // 2
        left = np.empty((row_panels, pairs, ROWS), I32)
        for panel in numba.prange(row_panels):
            _pack(some_first[:, panel * ROWS : (panel + 1) * ROWS], left[panel])
        for number in numba.prange(column_panels):
            # With `lower`, the panels have different work. Threads get panels from both ends.
            panel = number // 2 if number % 2 == 0 else column_panels - 1 - number // 2
            column = panel * COLUMNS
            right = np.empty((pairs, COLUMNS), I32)
            _pack(some_second[:, column : column + COLUMNS], right)
            _add_panel(sums, left, right, column, column // ROWS if lower else 0)


@compiled()
def _add_panel(sums: Floats, left: Panels, right: Panels, column: int, first_panel: int) -> None:
    rows, columns = sums.shape
    is_whole = column + COLUMNS <= columns
    block = np.empty((ROWS, COLUMNS), F32)
    for panel in range(first_panel, len(left)):
        row = panel * ROWS
        if is_whole and row + ROWS <= rows:
            _add_block(
                sums[row:, column:].ctypes.data,
                left[panel].ctypes.data,
                right.ctypes.data,
                columns,
                len(right),
            )
            continue
        block[:] = 0
        _add_block(
            block.ctypes.data, left[panel].ctypes.data, right.ctypes.data, COLUMNS, len(right)
        )
        part = sums[row : row + ROWS, column : column + COLUMNS]
        part += block[: part.shape[0], : part.shape[1]]


@compiled()
def _pack(states: Bits, pairs: Panels) -> None:
    """Interleave the values of two tokens. Fill missing tokens and columns with zeros."""
    wide_vectors()
    tokens, columns = states.shape
    pairs[:] = 0
    for pair in range(len(pairs)):
        second = 2 * pair + 1
        for column in range(columns):
            value = I32(states[2 * pair, column])
            if second < tokens:
                value |= I32(states[second, column]) << 16
            pairs[pair, column] = value


def _generate_block(
    target: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Sequence[ir.Value]
) -> ir.Value:
    sums, left, right, stride, pairs = arguments
    floats, integers = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.IntType(32)))
    index = stride.type
    # LLVM converts this older form of the intrinsic, in which pairs are integers.
    multiply = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(floats, [floats, integers, integers]),
        "llvm.x86.avx512bf16.dpbf16ps.512",
    )

    def place(start: ir.Value, offset: ir.Value, kind: ir.Type) -> ir.Value:
        address = builder.add(start, builder.mul(offset, index(4)))
        return builder.inttoptr(address, kind.as_pointer())

    def load(start: ir.Value, offset: ir.Value, kind: ir.Type) -> ir.Value:
        return builder.load(place(start, offset, kind), align=4)

    blocks = [(row, vector) for row in range(ROWS) for vector in range(VECTORS)]
    offsets = [
        builder.add(builder.mul(stride, index(row)), index(vector * LANES))
        for row, vector in blocks
    ]
    registers = [cgutils.alloca_once(builder, floats) for _ in blocks]
    for register in registers:
        builder.store(ir.Constant(floats, [0.0] * LANES), register)
    with cgutils.for_range(builder, pairs, intp=index) as loop:
        first_row = builder.mul(loop.index, index(ROWS))
        first_column = builder.mul(loop.index, index(COLUMNS))
        vectors = [
            load(right, builder.add(first_column, index(vector * LANES)), integers)
            for vector in range(VECTORS)
        ]
        for row in range(ROWS):
            pair = load(left, builder.add(first_row, index(row)), ir.IntType(32))
            same = builder.insert_element(
                ir.Constant(integers, ir.Undefined), pair, ir.IntType(32)(0)
            )
            same = builder.shuffle_vector(same, same, ir.Constant(integers, [0] * LANES))
            for vector in range(VECTORS):
                register = registers[row * VECTORS + vector]
                added = builder.call(multiply, [builder.load(register), same, vectors[vector]])
                builder.store(added, register)
    # Sums of a pass are added only here, so that few additions round to digits of the total.
    for offset, register in zip(offsets, registers, strict=True):
        total = builder.fadd(load(sums, offset, floats), builder.load(register))
        builder.store(total, place(sums, offset, floats), align=4)
    return target.get_dummy_value()


def _block(
    context: Context, sums: int, left: int, right: int, stride: int, pairs: int
) -> tuple[Signature, object]:
    """Add the products of a panel of rows and a panel of columns to a block of sums.

    The first three arguments are addresses. `stride` is the number of values in a row of sums.
    """
    return types.none(*[types.intp] * 5), _generate_block


_add_block = cast(Callable[[int, int, int, int, int], None], intrinsic(_block))
