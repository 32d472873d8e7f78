"""FP8: e4m3 codes with one float32 scale a block; a row and a whole weight are blocks too."""

import numpy as np

from vexport.numerics.arithmetic import E4M3, F32, Bits, Floats, widen
from vexport.numerics.codes import SPAN, Bytes, e4m3_codes, largest_magnitude, spread
from vexport.numerics.constants import FLOAT32_EPS
from vexport.numerics.jit import compiled


@compiled()
def find_scales(weight: Bits, storage: int, wide: int, scales: Floats) -> None:
    """The min-max scale of every `wide` columns of `weight`; infinite where a value is not finite."""
    for block in range(scales.size):
        most = F32(0.0)
        for row in range(weight.shape[0]):
            part = weight[row, block * wide : (block + 1) * wide]
            most = max(most, largest_magnitude(part, storage))
        scale = F32(most / E4M3.high)
        scales[block] = scale if scale else F32(FLOAT32_EPS)


@compiled()
def pack(weight: Bits, storage: int, high: int, wide: int, scales: Floats, given: bool, codes: Bytes) -> None:
    """Quantize a weight (rows, columns) in blocks of `high` rows and `wide` columns, the last ones smaller.

    `scales` (block rows, block columns) are used where `given`, else made here: infinite where a value of
    the block is not finite. `codes` has the weight's shape.
    """
    rows, columns = weight.shape
    values, steps = np.empty(SPAN, F32), np.empty(columns, F32)
    for row in range(rows):
        if row % high == 0:
            if not given:
                find_scales(weight[row : row + high], storage, wide, scales[row // high])
            spread(scales[row // high], wide, steps)
        for start in range(0, columns, SPAN):
            end = min(start + SPAN, columns)
            widen(values[: end - start], weight[row, start:end], storage)
            e4m3_codes(values[: end - start], steps[start:end], codes[row, start:end])
