"""Integer weights: INT8 as it is, 2 to 8 bits packed into int32."""

from collections.abc import Mapping

import torch

from vexport.compress.tiles import row_tiles
from vexport.observers import QParamsDict
from vexport.observers.qparams import quantized_range
from vexport.schemes.base import SchemeArgs
from vexport.schemes.integer import INT32_BITS, group_size, words

# So many values of any width fill whole words.
VALUES_OF_WHOLE_WORDS = INT32_BITS
WORD_MASK = (1 << INT32_BITS) - 1


def compress_int8(weight: torch.Tensor, qparams: QParamsDict, args: SchemeArgs) -> Mapping[str, torch.Tensor]:
    """weight (out, in) int8 and weight_scale (out, 1) float32."""
    scale = qparams["scale"].reshape(-1, 1)
    low, high = quantized_range(args.weights)
    stored = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for rows, tile in row_tiles(weight):
        stored[rows] = (tile / scale[rows]).round().clamp(low, high).to(torch.int8)
    return {"weight": stored, "weight_scale": scale}


def compress_packed(
    weight: torch.Tensor, qparams: QParamsDict, args: SchemeArgs
) -> Mapping[str, torch.Tensor]:
    """weight_packed (out, ceil(in*bits/32)) int32, weight_scale in the weight's dtype, weight_shape int64.

    Asymmetric: weight_zero_point (ceil(out*bits/32), in/group) int32. Weights are rounded with the scale
    as it is stored.
    """
    scale, zero_point = qparams["scale"].to(weight.dtype), qparams["zero_point"]
    low, high = quantized_range(args.weights)
    bits, size = args.weights.num_bits, group_size(args)
    packed = torch.empty(
        weight.shape[0], words(weight.shape[1], bits), dtype=torch.int32, device=weight.device
    )
    for rows, tile in row_tiles(weight):
        steps = scale[rows].to(torch.float32).unsqueeze(-1)
        # A scale that the dtype stores as zero: all is zero, whatever the codes.
        steps = steps.masked_fill(steps == 0, torch.inf)
        zeros = zero_point[rows].unsqueeze(-1)
        scaled = tile.reshape(*steps.shape[:2], size) / steps + zeros
        integers = scaled.round().clamp(low, high) - low
        packed[rows] = pack_int32(integers.reshape(tile.shape).to(torch.int64), bits)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    stored = {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}
    if args.weights.symmetric:
        return stored
    unsigned = zero_point.to(torch.int64) - int(low)
    return {**stored, "weight_zero_point": pack_int32(unsigned.T, bits).T.contiguous()}


def pack_int32(unsigned: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack (rows, columns) unsigned int64 values of `bits` bits into (rows, ceil(columns*bits/32)) int32.

    Value i takes the bits from i*bits on, low bits first, also across the border of two words.
    """
    rows, columns = unsigned.shape
    padded = torch.nn.functional.pad(unsigned, (0, -columns % VALUES_OF_WHOLE_WORDS))
    runs = padded.reshape(rows, -1, VALUES_OF_WHOLE_WORDS)
    packed = torch.zeros(*runs.shape[:2], bits, dtype=torch.int64, device=unsigned.device)
    for position in range(VALUES_OF_WHOLE_WORDS):
        word, offset = divmod(position * bits, INT32_BITS)
        value = runs[..., position]
        packed[..., word] |= (value << offset) & WORD_MASK
        if offset + bits > INT32_BITS:
            packed[..., word + 1] |= value >> (INT32_BITS - offset)
    return packed.reshape(rows, -1)[:, : words(columns, bits)].to(torch.int32)


def unpack_int32(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The inverse of `pack_int32`: (rows, columns) int64."""
    unsigned = packed.to(torch.int64) & WORD_MASK
    padded = torch.nn.functional.pad(unsigned, (0, -packed.shape[1] % bits))
    runs = padded.reshape(packed.shape[0], -1, bits)
    values = torch.empty(*runs.shape[:2], VALUES_OF_WHOLE_WORDS, dtype=torch.int64, device=packed.device)
    for position in range(VALUES_OF_WHOLE_WORDS):
        word, offset = divmod(position * bits, INT32_BITS)
        value = runs[..., word] >> offset
        if offset + bits > INT32_BITS:
            value = value | (runs[..., word + 1] << (INT32_BITS - offset))
        values[..., position] = value & ((1 << bits) - 1)
    return values.reshape(packed.shape[0], -1)[:, :columns]
