"""Integers: INT8 per channel as it is, 2 to 8 bits packed into int32 along in_features."""

import numpy as np

from vexport.formats.arguments import QuantArgs
from vexport.formats.packing.base import STORAGES, Array, Bytes, PackingInputs, require_finite
from vexport.formats.parameters import words
from vexport.kernels import integer
from vexport.numerics.arithmetic import FLOAT32, Bits, Floats
from vexport.numerics.codes import pack_bits
from vexport.numerics.constants import INT32_BITS
from vexport.types import LinearPlan


class IntegerPacking:
    """What both storages share: scales and zero points by group, rows into codes of `form`."""

    multiple = 1

    def __init__(
        self,
        member: LinearPlan,
        dtype: str,
        args: QuantArgs,
        inputs: PackingInputs,
        *,
        form: integer.Integers,
    ) -> None:
        self._member = member
        self._storage = STORAGES[dtype]
        self._form = form
        groups = member.in_features // (args.group or member.in_features)
        self._given = inputs.scales is not None
        self._scales: Floats = np.empty((member.out_features, groups), np.float32)
        self._zeros: Floats = np.zeros_like(self._scales)
        if inputs.scales is not None:
            self._scales[:] = inputs.scales.scale.reshape(self._scales.shape)
            self._zeros[:] = inputs.scales.zero_point.reshape(self._scales.shape)

    def packed(self, rows: Bits, first: int, row_bytes: int) -> Bytes:
        """The codes of some rows, each filled up to `row_bytes`; InputError where a weight is not finite."""
        part = slice(first, first + rows.shape[0])
        codes = np.zeros((rows.shape[0], row_bytes), np.uint8)
        scales = self._scales[part]
        integer.pack(rows, self._storage, self._form, scales, self._zeros[part], self._given, codes)
        require_finite(self._member, scales)
        return codes


class Int8Packing(IntegerPacking):
    """weight (out, in) int8 and weight_scale (out, 1) float32."""

    def __init__(self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: PackingInputs) -> None:
        form = integer.Integers(bits=args.num_bits, base=0, symmetric=True, scale_storage=FLOAT32)
        super().__init__(member, dtype, args, inputs, form=form)

    def pack(self, rows: Bits, first: int) -> Array:
        """The int8 values of some rows."""
        return self.packed(rows, first, rows.shape[1])

    def tensor(self, name: str) -> Array:
        """weight_scale."""
        assert name == "weight_scale"
        return self._scales


class PackedIntegerPacking(IntegerPacking):
    """weight_packed (out, ceil(in*bits/32)) int32, weight_scale in the weight's dtype, weight_shape int64.

    Asymmetric: weight_zero_point (ceil(out*bits/32), in/group) int32, packed along out_features.
    """

    def __init__(self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: PackingInputs) -> None:
        base = -(2 ** (args.num_bits - 1))
        form = integer.Integers(
            bits=args.num_bits, base=base, symmetric=args.symmetric, scale_storage=STORAGES[dtype]
        )
        super().__init__(member, dtype, args, inputs, form=form)
        self._dtype = dtype

    def pack(self, rows: Bits, first: int) -> Array:
        """The packed values of some rows."""
        return self.packed(rows, first, packed_bytes(rows.shape[1], self._form.bits))

    def tensor(self, name: str) -> Array:
        """weight_scale, weight_shape or weight_zero_point."""
        if name == "weight_shape":
            return np.array([self._member.out_features, self._member.in_features], np.int64)
        return self._stored_scales() if name == "weight_scale" else self._packed_zeros()

    def _stored_scales(self) -> Array:
        """The scales, which have values of the weight's dtype already, in that dtype."""
        if self._dtype == "BF16":
            return (self._scales.view(np.uint32) >> 16).astype(np.uint16)
        return self._scales.astype({"F16": np.float16, "F32": np.float32, "F64": np.float64}[self._dtype])

    def _packed_zeros(self) -> Array:
        unsigned = (self._zeros - self._form.base).astype(np.uint8)
        packed = np.zeros((unsigned.shape[1], packed_bytes(unsigned.shape[0], self._form.bits)), np.uint8)
        for codes, target in zip(np.ascontiguousarray(unsigned.T), packed, strict=True):
            pack_bits(codes, self._form.bits, target)
        return packed.view(np.int32).T


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of the whole int32 words that `count` values of `bits` bits fill."""
    return words(count, bits) * INT32_BITS // 8
