"""MXFP4 and MXFP8: e2m1 or e4m3 codes and an exponent for every 32 of them."""

import numpy as np

from vexport.formats.arguments import QuantArgs
from vexport.formats.packing.base import STORAGES, Array, Bytes, PackingInputs, not_finite
from vexport.kernels import mxfp
from vexport.numerics.arithmetic import Bits, Floats
from vexport.numerics.codes import FLOAT32_MANTISSA
from vexport.numerics.constants import E8M0_NAN, MX_GROUP
from vexport.types import LinearPlan


class MxfpPacking:
    """weight or weight_packed in `args.num_bits` bits, weight_scale (out, in/32) uint8."""

    multiple = 1

    def __init__(self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: PackingInputs) -> None:
        self._member = member
        self._storage = STORAGES[dtype]
        self._bits = args.num_bits
        shape = (member.out_features, member.in_features // MX_GROUP)
        self._given = inputs.scales is not None
        self._scales: Bytes = np.empty(shape, np.uint8)
        if inputs.scales is not None:
            self._scales[:] = exponents(inputs.scales.scale).reshape(shape)

    def pack(self, rows: Bits, first: int) -> Array:
        """The codes of some rows; InputError where a weight is not finite."""
        scales = self._scales[first : first + rows.shape[0]].reshape(-1)
        packed = np.empty(rows.size * self._bits // 8, np.uint8)
        mxfp.pack(rows.reshape(-1), self._storage, self._bits, scales, self._given, packed)
        if (scales == E8M0_NAN).any():
            raise not_finite(self._member)
        return packed

    def tensor(self, name: str) -> Array:
        """weight_scale."""
        assert name == "weight_scale"
        return self._scales


def exponents(scale: Floats) -> Bytes:
    """The exponents, biased by 127, of powers of two."""
    biased: Bytes = (scale.view(np.int32) >> FLOAT32_MANTISSA).astype(np.uint8)
    return biased
