"""Integers with a scale per run of columns: plain INT8, or 2 to 8 bits packed into words."""

from typing import NamedTuple

import numpy as np

from vexport.formats.arguments import QuantArgs
from vexport.formats.base import words
from vexport.formats.packing.base import STORAGES, Array, PackingInputs, require_finite, storage_of
from vexport.numerics import FLOAT32_EPS, INT32_BITS
from vexport.numerics.arithmetic import (
    Bits,
    Bytes,
    Floats,
    as_stored,
    largest_magnitude,
    pack_bits,
    spread,
    value_range,
    widen,
)
from vexport.numerics.jit import compiled, wide_vectors
from vexport.numerics.number_formats import F32, FLOAT32, I32
from vexport.records import LinearPlan


class Integers(NamedTuple):
    """Integers of `bits` bits that values are quantized to.

    `base` is the integer with code zero: the smallest integer, or 0 if codes are two's complement.
    `symmetric` is True if there are no zero points. Scales are rounded to the dtype `scale_storage`
    before values are quantized.
    """

    bits: int
    base: int
    symmetric: bool
    scale_storage: int


@compiled()
def symmetric_scale(group: Bits, storage: int, bits: int) -> np.float32:
    """Return the min-max scale of a group, or infinity if a value is not finite."""
    scale = F32(largest_magnitude(group, storage) / F32(F32(2**bits - 1) / F32(2.0)))
    return scale if scale else F32(FLOAT32_EPS)


@compiled()
def scale_and_zero(
    group: Bits, storage: int, bits: int, values: Floats
) -> tuple[np.float32, np.float32]:
    """Return a group's min-max scale (infinity if a value is not finite) and zero point."""
    widen(values[: group.size], group, storage)
    low, high = value_range(values[: group.size])
    if np.isnan(low) or np.isnan(high):
        return F32(np.inf), F32(0.0)
    low, high = min(low, F32(0.0)), max(high, F32(0.0))
    smallest = F32(-(2 ** (bits - 1)))
    scale = F32(F32(high - low) / F32(2**bits - 1))
    scale = scale if scale else F32(FLOAT32_EPS)
    zero = F32(np.rint(F32(smallest - F32(low / scale))))
    return scale, min(max(zero, smallest), F32(-smallest - F32(1.0)))


@compiled()
def find_scales(
    row: Bits, storage: int, form: Integers, scales: Floats, zeros: Floats, values: Floats
) -> None:
    """Write the min-max scales and zero points of a row's groups."""
    wide = row.size // max(1, scales.size)
    for group in range(scales.size):
        part = row[group * wide : (group + 1) * wide]
        if form.symmetric:
            scales[group], zeros[group] = symmetric_scale(part, storage, form.bits), F32(0.0)
        else:
            scales[group], zeros[group] = scale_and_zero(part, storage, form.bits, values)


@compiled()
def quantize(values: Floats, steps: Floats, zeros: Floats, form: Integers, codes: Bytes) -> None:
    """Divide each value by its step, and write the code. If a step is zero, write zero's code."""
    wide_vectors()
    smallest = F32(-(2 ** (form.bits - 1)))
    largest = F32(-smallest - F32(1.0))
    for i in range(codes.size):
        step = steps[i] if steps[i] > 0 else F32(np.inf)
        scaled = F32(F32(values[i] / step) + zeros[i])
        codes[i] = np.uint8(I32(I32(np.rint(min(max(scaled, smallest), largest))) - I32(form.base)))


@compiled()
def pack_rows(
    weight: Bits,
    storage: int,
    form: Integers,
    scales: Floats,
    zeros: Floats,
    fixed: bool,
    packed: Bytes,
) -> None:
    """Quantize a weight (rows, columns) in groups of columns, and write codes to `packed`.

    With `fixed`, `scales` and `zeros` (rows, groups) are inputs; otherwise they are computed here.
    Scales are rounded to their storage dtype, and are infinite if a value is not finite. `packed`
    (rows, bytes) must be zero after the last code.
    """
    rows, columns = weight.shape
    wide = columns // max(1, scales.shape[1])
    values, codes = np.empty(columns, F32), np.empty(columns, np.uint8)
    steps, shifts = np.empty(columns, F32), np.empty(columns, F32)
    for row in range(rows):
        if not fixed:
            find_scales(weight[row], storage, form, scales[row], zeros[row], values)
        for group in range(scales.shape[1]):
            scales[row, group] = as_stored(scales[row, group], form.scale_storage)
        spread(scales[row], wide, steps)
        spread(zeros[row], wide, shifts)
        widen(values, weight[row], storage)
        quantize(values, steps, shifts, form, codes)
        pack_bits(codes, form.bits, packed[row])


class IntegerPacking:
    """Packing for both storages: scales and zero points per group, and rows of codes of `form`."""

    multiple = 1

    def __init__(
        self,
        member: LinearPlan,
        dtype: str,
        args: QuantArgs,
        inputs: PackingInputs,
        *,
        form: Integers,
    ) -> None:
        self._member = member
        self._dtype = dtype
        self._form = form
        groups = member.in_features // (args.group or member.in_features)
        self._fixed = inputs.scales is not None
        self._scales: Floats = np.empty((member.out_features, groups), np.float32)
        self._zeros: Floats = np.zeros_like(self._scales)
        if inputs.scales is not None:
            self._scales[:] = inputs.scales.scale.reshape(self._scales.shape)
            self._zeros[:] = inputs.scales.zero_point.reshape(self._scales.shape)

    def packed(self, rows: Bits, first: int, row_bytes: int) -> Bytes:
        """Return the codes of some rows, each padded to `row_bytes`.

        Raises InputError if a weight is not finite.
        """
        part = slice(first, first + rows.shape[0])
        codes = np.zeros((rows.shape[0], row_bytes), np.uint8)
        scales = self._scales[part]
        storage = storage_of(rows, self._dtype)
        pack_rows(rows, storage, self._form, scales, self._zeros[part], self._fixed, codes)
        require_finite(self._member, scales)
        return codes


class Int8Packing(IntegerPacking):
    """weight (out, in) int8 and weight_scale (out, 1) float32."""

    def __init__(
        self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: PackingInputs
    ) -> None:
        form = Integers(bits=args.num_bits, base=0, symmetric=True, scale_storage=FLOAT32)
        super().__init__(member, dtype, args, inputs, form=form)

    def pack(self, rows: Bits, first: int) -> Array:
        """Return the int8 values of some rows."""
        return self.packed(rows, first, rows.shape[1])

    def tensor(self, name: str) -> Array:
        assert name == "weight_scale"
        return self._scales


class PackedIntegerPacking(IntegerPacking):
    """weight_packed int32, weight_scale in the weight's dtype and weight_shape int64.

    weight_packed has shape (out, ceil(in*bits/32)). Asymmetric weights add weight_zero_point
    (ceil(out*bits/32), in/group) int32, packed along out_features.
    """

    def __init__(
        self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: PackingInputs
    ) -> None:
        base = -(2 ** (args.num_bits - 1))
        form = Integers(
            bits=args.num_bits, base=base, symmetric=args.symmetric, scale_storage=STORAGES[dtype]
        )
        super().__init__(member, dtype, args, inputs, form=form)

    def pack(self, rows: Bits, first: int) -> Array:
        """Return the packed values of some rows."""
        return self.packed(rows, first, packed_bytes(rows.shape[1], self._form.bits))

    def tensor(self, name: str) -> Array:
        """Return weight_scale, weight_shape or weight_zero_point."""
        if name == "weight_shape":
            return np.array([self._member.out_features, self._member.in_features], np.int64)
        return self._stored_scales() if name == "weight_scale" else self._packed_zeros()

    def _stored_scales(self) -> Array:
        """Return the scales in the weight's dtype. They were already rounded to this dtype."""
        if self._dtype == "BF16":
            return (self._scales.view(np.uint32) >> 16).astype(np.uint16)
        return self._scales.astype(
            {"F16": np.float16, "F32": np.float32, "F64": np.float64}[self._dtype]
        )

    def _packed_zeros(self) -> Array:
        unsigned = (self._zeros - self._form.base).astype(np.uint8)
        packed = np.zeros(
            (unsigned.shape[1], packed_bytes(unsigned.shape[0], self._form.bits)), np.uint8
        )
        for codes, target in zip(np.ascontiguousarray(unsigned.T), packed, strict=True):
            pack_bits(codes, self._form.bits, target)
        return packed.view(np.int32).T


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of the complete int32 words that `count` values of `bits` bits fill."""
    return words(count, bits) * INT32_BITS // 8
