"""Integer weights: INT8 as it is, fewer bits packed into int32."""

from collections.abc import Mapping

import torch

from vexport.compress.tiles import row_tiles
from vexport.observers import QParamsDict
from vexport.observers.qparams import quantized_range
from vexport.schemes.base import SchemeArgs
from vexport.schemes.integer import INT32_BITS, group_size


def compress_int8(weight: torch.Tensor, qparams: QParamsDict, args: SchemeArgs) -> Mapping[str, torch.Tensor]:
    """weight (out, in) int8 and weight_scale (out, 1) float32."""
    scale = qparams["scale"].reshape(-1, 1)
    low, high = quantized_range(args.weights)
    stored = torch.empty(weight.shape, dtype=torch.int8)
    for rows, tile in row_tiles(weight):
        stored[rows] = (tile / scale[rows]).round().clamp(low, high).to(torch.int8)
    return {"weight": stored, "weight_scale": scale}


def compress_packed(
    weight: torch.Tensor, qparams: QParamsDict, args: SchemeArgs
) -> Mapping[str, torch.Tensor]:
    """weight_packed (out, ceil(in*bits/32)) int32, weight_scale in the weight's dtype, weight_shape int64.

    Weights are rounded with the scale as it is stored.
    """
    scale = qparams["scale"].to(weight.dtype)
    low, high = quantized_range(args.weights)
    rows_total, columns = weight.shape
    bits, size = args.weights.num_bits, group_size(args)
    packed = torch.empty(rows_total, -(-columns * bits // INT32_BITS), dtype=torch.int32)
    for rows, tile in row_tiles(weight):
        steps = scale[rows].to(torch.float32).unsqueeze(-1)
        integers = (tile.reshape(*steps.shape[:2], size) / steps).round().clamp(low, high) - low
        packed[rows] = pack_int32(integers.reshape(tile.shape).to(torch.int64), bits)
    shape = torch.tensor([rows_total, columns], dtype=torch.int64)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}


def pack_int32(unsigned: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack (rows, columns) unsigned values of `bits` bits, a divisor of 32, low bits first."""
    per_word = INT32_BITS // bits
    padded = torch.nn.functional.pad(unsigned, (0, -unsigned.shape[1] % per_word))
    words = padded.reshape(unsigned.shape[0], -1, per_word)
    shifts = torch.arange(per_word, dtype=torch.int64) * bits
    return (words << shifts).sum(-1).to(torch.int32)
