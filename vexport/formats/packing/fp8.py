"""FP8: e4m3 weights with a scale per channel, block or tensor."""

import numpy as np

from vexport.formats.arguments import QuantArgs
from vexport.formats.packing.base import STORAGES, Array, PackingInputs, require_finite
from vexport.formats.parameters import scale_shape
from vexport.kernels import fp8
from vexport.numerics.arithmetic import Bits, Floats
from vexport.numerics.scales import fp8_scale_of
from vexport.types import LinearPlan


class Fp8Packing:
    """weight (out, in) e4m3 and weight_scale float32, shaped as `scale_shape` says."""

    def __init__(self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: PackingInputs) -> None:
        self._member = member
        self._storage = STORAGES[dtype]
        self._shape = scale_shape(args, (member.out_features, member.in_features))
        self._high, self._wide = block_of(args, member)
        self.multiple = 1 if args.strategy == "tensor" else self._high
        blocks = (-(-member.out_features // self._high), -(-member.in_features // self._wide))
        self._given = inputs.scales is not None or inputs.largest is not None
        self._scales: Floats = np.empty(blocks, np.float32)
        if inputs.scales is not None:
            self._scales[:] = inputs.scales.scale.reshape(blocks)
        elif inputs.largest is not None:
            self._scales[:] = fp8_scale_of(inputs.largest)

    def pack(self, rows: Bits, first: int) -> Array:
        """The codes of some rows; InputError where a weight is not finite."""
        begin, end = first // self._high, -(-(first + rows.shape[0]) // self._high)
        scales = self._scales[begin:end]
        codes = np.empty(rows.shape, np.uint8)
        fp8.pack(rows, self._storage, self._high, self._wide, scales, self._given, codes)
        require_finite(self._member, scales)
        return codes

    def tensor(self, name: str) -> Array:
        """weight_scale."""
        assert name == "weight_scale"
        return self._scales.reshape(self._shape)


def block_of(args: QuantArgs, member: LinearPlan) -> tuple[int, int]:
    """(rows, columns) that share a scale."""
    if args.strategy == "tensor":
        return member.out_features, member.in_features
    return args.block_structure or (1, member.in_features)
