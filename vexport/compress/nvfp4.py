"""NVFP4: two e2m1 values to the byte, the even column in the low nibble."""

from collections.abc import Mapping

import torch

from vexport.compress.tiles import row_tiles
from vexport.observers import QParamsDict
from vexport.schemes.base import SchemeArgs
from vexport.schemes.nvfp4 import GROUP_SIZE

SIGN_BIT = 8
# Midpoints of the e2m1 values 0, .5, 1, 1.5, 2, 3, 4, 6. A tie goes to the even mantissa: at a midpoint
# marked True the upper value wins (cast_to_fp4 in compressed_tensors/quantization/quant_args.py).
MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


def compress(weight: torch.Tensor, qparams: QParamsDict, args: SchemeArgs) -> Mapping[str, torch.Tensor]:
    """weight_packed (out, in/2) uint8, weight_scale (out, in/16) e4m3, weight_global_scale (1,) float32."""
    global_scale = qparams["global_scale"]
    assert global_scale is not None
    packed = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8, device=weight.device)
    for rows, tile in row_tiles(weight):
        steps = (qparams["scale"][rows] / global_scale).unsqueeze(-1)
        codes = e2m1_codes(tile.reshape(*steps.shape[:2], GROUP_SIZE) / steps)
        packed[rows] = pack_nibbles(codes.reshape(tile.shape))
    return {
        "weight_packed": packed,
        "weight_scale": qparams["scale"].to(torch.float8_e4m3fn),
        "weight_global_scale": global_scale,
    }


def e2m1_codes(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest e2m1 code of each value: uint8, bit 3 is the sign, values beyond 6 saturate."""
    magnitude = scaled.abs()
    codes = torch.zeros(scaled.shape, dtype=torch.uint8, device=scaled.device)
    for midpoint, tie_goes_up in MIDPOINTS:
        codes += magnitude >= midpoint if tie_goes_up else magnitude > midpoint
    return codes | (torch.signbit(scaled).to(torch.uint8) * SIGN_BIT)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two codes of 4 bits (rows, columns) to the byte, the even column in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
