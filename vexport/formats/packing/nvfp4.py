"""NVFP4: packed e2m1, e4m3 block scales, a global scale that fused layers share."""

import numpy as np

from vexport.formats.arguments import QuantArgs
from vexport.formats.packing.base import STORAGES, Array, Bytes, PackingInputs
from vexport.kernels import nvfp4
from vexport.numerics.arithmetic import Bits
from vexport.numerics.constants import NVFP4_GROUP
from vexport.numerics.scales import global_scale_of
from vexport.types import LinearPlan


class Nvfp4Packing:
    """weight_packed (out, in/2) uint8, weight_scale (out, in/16) e4m3, weight_global_scale (1,) float32."""

    multiple = 1

    def __init__(self, member: LinearPlan, dtype: str, args: QuantArgs, inputs: PackingInputs) -> None:
        self._storage = STORAGES[dtype]
        self._given = inputs.scales is not None
        shape = (member.out_features, member.in_features // NVFP4_GROUP)
        self._scales: Bytes = np.empty(shape, np.uint8)
        if inputs.scales is not None:
            assert inputs.scales.global_scale is not None
            self._global_scale = inputs.scales.global_scale
            nvfp4.encode(inputs.scales.scale.reshape(-1), self._scales.reshape(-1))
        else:
            assert inputs.largest is not None
            self._global_scale = global_scale_of(inputs.largest)

    def pack(self, rows: Bits, first: int) -> Array:
        """The packed codes of finite rows."""
        scales = self._scales[first : first + rows.shape[0]].reshape(-1)
        packed = np.empty(rows.size // 2, np.uint8)
        nvfp4.pack(rows.reshape(-1), self._storage, self._global_scale[0], scales, self._given, packed)
        return packed

    def tensor(self, name: str) -> Array:
        """weight_scale or weight_global_scale."""
        return self._scales if name == "weight_scale" else self._global_scale
