"""MXFP4 and MXFP8: e2m1 or e4m3 codes in groups of 32, with a power of two as scale."""

import numpy as np

from vexport.formats.arguments import QuantArgs
from vexport.formats.packing.base import Array, PackingInputs, not_finite, storage_of
from vexport.numerics import E8M0_NAN, MX_GROUP
from vexport.numerics.arithmetic import (
    MAGNITUDE,
    SPAN,
    Bits,
    Bytes,
    Floats,
    as_float,
    e2m1_codes,
    e4m3_codes,
    mx_code,
    mx_step,
    pack_bits,
    widen,
)
from vexport.numerics.jit import compiled
from vexport.numerics.number_formats import E2M1, E4M3, F32, FLOAT32_MANTISSA, I32, NumberFormat
from vexport.records import LinearPlan


@compiled()
def find_scales(values: Floats, form: NumberFormat, scales: Bytes) -> None:
    """Write the exponent, biased by 127, of the min-max scale of every 32 values.

    The exponent is 255 if a value is not finite.
    """
    stored = values.view(np.int32)
    for group in range(scales.size):
        most = I32(0)
        for i in range(MX_GROUP):
            most = max(most, I32(stored[group * MX_GROUP + i] & I32(MAGNITUDE)))
        scales[group] = np.uint8(mx_code(as_float(most), form))


@compiled()
def find_steps(scales: Bytes, steps: Floats) -> None:
    """Write the step of each value, computed from the exponent of its group of 32."""
    for group in range(scales.size):
        step = mx_step(scales[group])
        for i in range(MX_GROUP):
            steps[group * MX_GROUP + i] = step


@compiled()
def pack_rows(
    weight: Bits, storage: int, bits: int, scales: Bytes, fixed: bool, packed: Bytes
) -> None:
    """Quantize a flat weight in groups of 32 to floats of 4 or 8 bits.

    `scales` (elements/32) are biased exponents. With `fixed` they are inputs; otherwise they are
    computed here, and are 255 if a value is not finite. `packed` has elements*bits/8 bytes.
    """
    values, steps, codes = np.empty(SPAN, F32), np.empty(SPAN, F32), np.empty(SPAN, np.uint8)
    for start in range(0, weight.size, SPAN):
        end = min(start + SPAN, weight.size)
        widen(values[: end - start], weight[start:end], storage)
        groups = scales[start // MX_GROUP : end // MX_GROUP]
        if not fixed:
            find_scales(values, E2M1 if bits == 4 else E4M3, groups)
        find_steps(groups, steps)
        if bits == 4:
            e2m1_codes(values, steps, codes[: end - start])
        else:
            e4m3_codes(values, steps, codes[: end - start])
        pack_bits(codes[: end - start], bits, packed[start * bits // 8 : end * bits // 8])


class MxfpPacking:
    """weight or weight_packed in `args.num_bits` bits, and weight_scale (out, in/32) uint8."""

    multiple = 1

    def __init__(
        self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: PackingInputs
    ) -> None:
        self._member = member
        self._dtype = dtype
        self._bits = args.num_bits
        shape = (member.out_features, member.in_features // MX_GROUP)
        self._fixed = inputs.scales is not None
        self._scales: Bytes = np.empty(shape, np.uint8)
        if inputs.scales is not None:
            self._scales[:] = exponents(inputs.scales.scale).reshape(shape)

    def pack(self, rows: Bits, first: int) -> Array:
        """Return the codes of some rows. Raises InputError if a weight is not finite."""
        scales = self._scales[first : first + rows.shape[0]].reshape(-1)
        packed = np.empty(rows.size * self._bits // 8, np.uint8)
        storage = storage_of(rows, self._dtype)
        pack_rows(rows.reshape(-1), storage, self._bits, scales, self._fixed, packed)
        if (scales == E8M0_NAN).any():
            raise not_finite(self._member.weight)
        return packed

    def tensor(self, name: str) -> Array:
        assert name == "weight_scale"
        return self._scales


def exponents(scale: Floats) -> Bytes:
    """Return the exponents, biased by 127, of powers of two."""
    biased: Bytes = (scale.view(np.int32) >> FLOAT32_MANTISSA).astype(np.uint8)
    return biased
