"""NVFP4: e2m1 codes in groups of 16, two per byte, with e4m3 scales relative to a global scale."""

import numpy as np

from vexport.formats.arguments import QuantArgs
from vexport.formats.packing.base import Array, PackingInputs, storage_of
from vexport.numerics import E4M3_EPS_CODE, NVFP4_GROUP
from vexport.numerics.arithmetic import (
    MAGNITUDE,
    SPAN,
    Bits,
    Bytes,
    Floats,
    as_float,
    e2m1_codes,
    e4m3_code,
    e4m3_codes,
    e4m3_value,
    global_scale_of,
    pack_nibbles,
    widen,
)
from vexport.numerics.jit import compiled
from vexport.numerics.number_formats import E2M1, F32, I32
from vexport.records import LinearPlan


@compiled()
def find_scales(values: Floats, global_scale: np.float32, scales: Bytes) -> None:
    """Write the e4m3 code of the min-max scale of every 16 values."""
    bits = values.view(np.int32)
    for group in range(scales.size):
        most = I32(0)
        for i in range(NVFP4_GROUP):
            most = max(most, I32(bits[group * NVFP4_GROUP + i] & I32(MAGNITUDE)))
        code = e4m3_code(F32(as_float(most) / E2M1.high) * global_scale, F32(1.0))
        scales[group] = code if code else np.uint8(E4M3_EPS_CODE)


@compiled()
def find_steps(scales: Bytes, global_scale: np.float32, steps: Floats) -> None:
    """Write the step of each value, computed from the scale of its group of 16."""
    for group in range(scales.size):
        step = F32(e4m3_value(scales[group]) / global_scale)
        for i in range(NVFP4_GROUP):
            steps[group * NVFP4_GROUP + i] = step


@compiled()
def pack_rows(
    weight: Bits, storage: int, global_scale: np.float32, scales: Bytes, fixed: bool, packed: Bytes
) -> None:
    """Quantize a flat, finite weight in groups of 16.

    `scales` (elements/16) are the e4m3 codes of the group scales. With `fixed` they are inputs;
    otherwise they are computed here. `packed` has elements/2 bytes.
    """
    values, steps, codes = np.empty(SPAN, F32), np.empty(SPAN, F32), np.empty(SPAN, np.uint8)
    for start in range(0, weight.size, SPAN):
        end = min(start + SPAN, weight.size)
        widen(values[: end - start], weight[start:end], storage)
        groups = scales[start // NVFP4_GROUP : end // NVFP4_GROUP]
        if not fixed:
            find_scales(values, global_scale, groups)
        find_steps(groups, global_scale, steps)
        e2m1_codes(values, steps, codes[: end - start])
        pack_nibbles(codes[: end - start], packed[start // 2 : end // 2])


class Nvfp4Packing:
    """weight_packed (out, in/2) uint8, weight_scale (out, in/16) e4m3, a float32 global scale."""

    multiple = 1

    def __init__(
        self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: PackingInputs
    ) -> None:
        self._dtype = dtype
        self._fixed = inputs.scales is not None
        shape = (member.out_features, member.in_features // NVFP4_GROUP)
        self._scales: Bytes = np.empty(shape, np.uint8)
        if inputs.scales is not None:
            assert inputs.scales.global_scale is not None
            self._global_scale = inputs.scales.global_scale
            scales = inputs.scales.scale.reshape(-1)
            e4m3_codes(scales, np.ones_like(scales), self._scales.reshape(-1))
        else:
            assert inputs.largest is not None
            self._global_scale = global_scale_of(inputs.largest)

    def pack(self, rows: Bits, first: int) -> Array:
        """Return the packed codes of finite rows."""
        scales = self._scales[first : first + rows.shape[0]].reshape(-1)
        packed = np.empty(rows.size // 2, np.uint8)
        storage = storage_of(rows, self._dtype)
        pack_rows(rows.reshape(-1), storage, self._global_scale[0], scales, self._fixed, packed)
        return packed

    def tensor(self, name: str) -> Array:
        """Return weight_scale or weight_global_scale."""
        return self._scales if name == "weight_scale" else self._global_scale
