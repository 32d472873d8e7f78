"""MXFP4 and MXFP8: a power of two as scale of each group of 32, stored as its biased exponent (e8m0)."""

from collections.abc import Mapping

import torch

from vexport.compress.fp8 import to_e4m3
from vexport.compress.nvfp4 import e2m1_codes, pack_nibbles
from vexport.compress.tiles import row_tiles
from vexport.observers import QParamsDict
from vexport.schemes.base import SchemeArgs
from vexport.schemes.mxfp import GROUP_SIZE

FLOAT32_MANTISSA_BITS = 23


def compress_mxfp4(
    weight: torch.Tensor, qparams: QParamsDict, args: SchemeArgs
) -> Mapping[str, torch.Tensor]:
    """weight_packed (out, in/2) uint8 and weight_scale (out, in/32) uint8."""
    packed = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8, device=weight.device)
    for rows, tile in row_tiles(weight):
        packed[rows] = pack_nibbles(e2m1_codes(_scaled(tile, qparams["scale"][rows])))
    return {"weight_packed": packed, "weight_scale": exponents(qparams["scale"])}


def compress_mxfp8(
    weight: torch.Tensor, qparams: QParamsDict, args: SchemeArgs
) -> Mapping[str, torch.Tensor]:
    """weight (out, in) e4m3 and weight_scale (out, in/32) uint8."""
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for rows, tile in row_tiles(weight):
        stored[rows] = to_e4m3(_scaled(tile, qparams["scale"][rows]))
    return {"weight": stored, "weight_scale": exponents(qparams["scale"])}


def exponents(scale: torch.Tensor) -> torch.Tensor:
    """The e8m0 code of each power of two: its float32 exponent, biased by 127 in both formats."""
    return (scale.to(torch.float32).view(torch.int32) >> FLOAT32_MANTISSA_BITS).to(torch.uint8)


def _scaled(tile: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (tile.reshape(*scale.shape, GROUP_SIZE) / scale.unsqueeze(-1)).reshape(tile.shape)
