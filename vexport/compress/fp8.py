"""FP8 e4m3 weights, scaled per tensor, channel or block."""

from collections.abc import Mapping

import torch

from vexport.compress.tiles import row_tiles
from vexport.observers import QParamsDict
from vexport.observers.qparams import FP8_MAX
from vexport.schemes.base import QuantArgs, SchemeArgs
from vexport.schemes.fp8 import block, scale_shape


def compress(weight: torch.Tensor, qparams: QParamsDict, args: SchemeArgs) -> Mapping[str, torch.Tensor]:
    """weight (out, in) e4m3 and weight_scale float32: (1,), (out, 1) or a value a block, ragged ones too."""
    columns = weight.shape[1]
    scale = qparams["scale"].reshape(scale_shape(args.weights, *weight.shape))
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for rows, tile in row_tiles(weight):
        stored[rows] = to_e4m3(tile / steps_of(scale, rows, columns, args.weights))
    return {"weight": stored, "weight_scale": scale}


def steps_of(scale: torch.Tensor, rows: slice, columns: int, args: QuantArgs) -> torch.Tensor:
    """The scales of some rows, broadcasting to (rows, columns)."""
    if args.strategy == "tensor":
        return scale
    if args.strategy == "channel":
        return scale[rows]
    high, wide = block(args)
    row = torch.arange(rows.start, rows.stop, device=scale.device)
    return scale[row // high].repeat_interleave(wide, 1)[:, :columns]


def to_e4m3(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 value of each element; what is beyond 448 saturates."""
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
