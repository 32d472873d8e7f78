"""FP8: e4m3 codes with a float32 scale per block. A row or a whole weight can be a block, too."""

import numpy as np

from vexport.formats.arguments import QuantArgs
from vexport.formats.base import scale_shape
from vexport.formats.packing.base import Array, PackingInputs, require_finite, storage_of
from vexport.numerics import FLOAT32_EPS
from vexport.numerics.arithmetic import (
    SPAN,
    Bits,
    Bytes,
    Floats,
    e4m3_codes,
    fp8_scale_of,
    largest_magnitude,
    spread,
    widen,
)
from vexport.numerics.jit import compiled
from vexport.numerics.number_formats import E4M3, F32
from vexport.records import LinearPlan


@compiled()
def find_scales(weight: Bits, storage: int, block_cols: int, scales: Floats) -> None:
    """Write the min-max scale of every `block_cols` columns.

    The scale is infinity if a value is not finite.
    """
    for block in range(scales.size):
        most = F32(0.0)
        for row in range(weight.shape[0]):
            part = weight[row, block * block_cols : (block + 1) * block_cols]
            most = max(most, largest_magnitude(part, storage))
        scale = F32(most / E4M3.high)
        scales[block] = scale if scale else F32(FLOAT32_EPS)


@compiled()
def pack_rows(
    weight: Bits,
    storage: int,
    block_rows: int,
    block_cols: int,
    scales: Floats,
    fixed: bool,
    codes: Bytes,
) -> None:
    """Quantize a weight (rows, columns) in blocks (`block_rows`, `block_cols`).

    The last blocks may be smaller. With `fixed`, `scales` (block rows, block columns) are inputs;
    otherwise they are computed here, and are infinite if a value of the block is not finite.
    `codes` has the weight's shape.
    """
    rows, columns = weight.shape
    values, steps = np.empty(SPAN, F32), np.empty(columns, F32)
    for row in range(rows):
        if row % block_rows == 0:
            if not fixed:
                find_scales(
                    weight[row : row + block_rows], storage, block_cols, scales[row // block_rows]
                )
            spread(scales[row // block_rows], block_cols, steps)
        for start in range(0, columns, SPAN):
            end = min(start + SPAN, columns)
            widen(values[: end - start], weight[row, start:end], storage)
            e4m3_codes(values[: end - start], steps[start:end], codes[row, start:end])


class Fp8Packing:
    """weight (out, in) e4m3 and weight_scale float32 of shape `scale_shape`."""

    def __init__(
        self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: PackingInputs
    ) -> None:
        self._member = member
        self._dtype = dtype
        self._shape = scale_shape(args, (member.out_features, member.in_features))
        self._block_rows, self._block_cols = block_of(args, member)
        self.multiple = 1 if args.strategy == "tensor" else self._block_rows
        blocks = (
            -(-member.out_features // self._block_rows),
            -(-member.in_features // self._block_cols),
        )
        self._fixed = inputs.scales is not None or inputs.largest is not None
        self._scales: Floats = np.empty(blocks, np.float32)
        if inputs.scales is not None:
            self._scales[:] = inputs.scales.scale.reshape(blocks)
        elif inputs.largest is not None:
            self._scales[:] = fp8_scale_of(inputs.largest)

    def pack(self, rows: Bits, first: int) -> Array:
        """Return the codes of some rows. Raises InputError if a weight is not finite."""
        begin, end = first // self._block_rows, -(-(first + rows.shape[0]) // self._block_rows)
        scales = self._scales[begin:end]
        codes = np.empty(rows.shape, np.uint8)
        storage = storage_of(rows, self._dtype)
        pack_rows(rows, storage, self._block_rows, self._block_cols, scales, self._fixed, codes)
        require_finite(self._member, scales)
        return codes

    def tensor(self, name: str) -> Array:
        assert name == "weight_scale"
        return self._scales.reshape(self._shape)


def block_of(args: QuantArgs, member: LinearPlan) -> tuple[int, int]:
    """Return the number of rows and columns that share a scale."""
    if args.strategy == "tensor":
        return member.out_features, member.in_features
    return args.block_structure or (1, member.in_features)
