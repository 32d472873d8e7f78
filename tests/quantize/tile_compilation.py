"""Compile the Triton kernel for GPUs, without a GPU or a driver, and print what it contains."""

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vexport.numerics.tensors import E4M3
from vexport.quantize.gptq import BLOCK_COLUMNS
from vexport.quantize.tile_kernel import TILE_ROWS, round_tile

ARCHITECTURES = (80, 90, 100)


def main() -> None:
    constants = {
        "low": E4M3.low,
        "high": E4M3.high,
        "mask": E4M3.mask,
        "floor": E4M3.floor,
        "rounder": E4M3.rounder,
        "tile_rows": TILE_ROWS,
        "block_columns": BLOCK_COLUMNS,
    }
    floats = dict.fromkeys(("values", "errors", "upper", "scales", "zeros"), "*fp32")
    sizes = dict.fromkeys(("first", "count", "rows", "columns", "groups_of_row"), "i32")
    signature = {**floats, "groups": "*i32", **sizes, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=round_tile, signature=signature, constexprs=constants)
    for architecture in ARCHITECTURES:
        target = GPUTarget("cuda", architecture, 32)
        kernel = triton.compile(source, target=target, options={"enable_fp_fusion": False})
        found = {
            "architecture": architecture,
            "bytes": len(kernel.asm["cubin"]),
            "divisions": sorted(set(re.findall(r"div\.[a-z0-9.]+f32", kernel.asm["ptx"]))),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
