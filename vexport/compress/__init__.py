"""Scale, round and pack: one file a scheme family, one line each in `COMPRESSORS`."""

from collections.abc import Callable, Mapping

import torch

from vexport.compress import fp8, integer, mxfp, nvfp4
from vexport.observers import QParamsDict
from vexport.schemes.base import SchemeArgs

# (weight (out, in), its parameters, the scheme's arguments) -> tensors by their name within the module
Compressor = Callable[[torch.Tensor, QParamsDict, SchemeArgs], Mapping[str, torch.Tensor]]

COMPRESSORS: Mapping[str, Compressor] = {
    "nvfp4-pack-quantized": nvfp4.compress,
    "mxfp4-pack-quantized": mxfp.compress_mxfp4,
    "mxfp8-quantized": mxfp.compress_mxfp8,
    "float-quantized": fp8.compress,
    "int-quantized": integer.compress_int8,
    "pack-quantized": integer.compress_packed,
}
