"""FP8 e4m3 weights, scaled per channel or per tensor."""

from collections.abc import Mapping

import torch

from vexport.compress.tiles import row_tiles
from vexport.observers import QParamsDict
from vexport.observers.qparams import FP8_MAX
from vexport.schemes.base import SchemeArgs


def compress(weight: torch.Tensor, qparams: QParamsDict, args: SchemeArgs) -> Mapping[str, torch.Tensor]:
    """weight (out, in) e4m3 and weight_scale (out, 1) or (1,) float32."""
    per_tensor = args.weights.strategy == "tensor"
    scale = qparams["scale"].reshape(1) if per_tensor else qparams["scale"].reshape(-1, 1)
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for rows, tile in row_tiles(weight):
        step = scale if per_tensor else scale[rows]
        stored[rows] = (tile / step).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}
