"""From a weight's rows to the bytes that are stored, without torch: one file a family, one line each here.

A packing wraps the family's kernel (`vexport.kernels`).
"""

from collections.abc import Mapping

from vexport.packing.base import Known, Packing, PackingType, Scales
from vexport.packing.fp8 import Fp8Packing
from vexport.packing.integer import Int8Packing, PackedIntegers
from vexport.packing.mxfp import MxfpPacking
from vexport.packing.nvfp4 import Nvfp4Packing

# By compressed-tensors' name of the storage.
PACKINGS: Mapping[str, PackingType] = {
    "nvfp4-pack-quantized": Nvfp4Packing,
    "mxfp4-pack-quantized": MxfpPacking,
    "mxfp8-quantized": MxfpPacking,
    "float-quantized": Fp8Packing,
    "int-quantized": Int8Packing,
    "pack-quantized": PackedIntegers,
}

__all__ = ["PACKINGS", "Known", "Packing", "PackingType", "Scales"]
