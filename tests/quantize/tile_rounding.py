"""Compare the Triton kernel with `round_compiled`, in a process with Triton's interpreter.

The interpreter must be selected before anything imports triton (TRITON_INTERPRET=1).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from vexport.formats.arguments import QuantArgs
from vexport.formats.schemes import get_scheme
from vexport.observers import load_observer
from vexport.quantize.gptq import GPTQ, Factor, Grid, factorize, grid_of, round_compiled
from vexport.quantize.scale_search import scales_of
from vexport.quantize.tile_kernel import round_tiles

# The last block has 37 columns. Neither number of rows is a multiple of a tile.
COLUMNS, ROWS, FEW_ROWS = 165, 19, 5
DEAD = 17
NOT_A_NUMBER = (3, 40)


def arguments() -> Iterator[tuple[str, QuantArgs]]:
    integers = get_scheme("W4A16_ASYM").args.weights
    for bits in range(2, 9):
        yield f"INT{bits}", replace(integers, num_bits=bits, group_size=32)
    for name in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "NVFP4", "MXFP4"):
        yield name, get_scheme(name).args.weights


def grid_for(args: QuantArgs, weight: torch.Tensor) -> Grid:
    observer = load_observer("memoryless_minmax", "weight", args, {})
    columns = weight.shape[1]
    padded = -(-columns // (args.group or columns)) * (args.group or columns)
    observer.observe(torch.nn.functional.pad(weight, (0, padded - columns)))
    shape = (weight.shape[0], columns)
    return grid_of(args, scales_of(observer.qparams()), shape, torch.float32)


def distance_to_tie(
    weight: torch.Tensor, rounded: torch.Tensor, other: float, column: int, place: Factor, row: int
) -> float:
    """Return how far the value of a column is from the middle between two rounded values.

    The unit is the distance of these values. The value is computed in float64, from the columns
    that were rounded before.
    """
    values = weight[row].double()
    upper = place.upper.double()
    for before in range(column):
        error = (values[before] - rounded[row, before]) / upper[before, before]
        values[before + 1 :] -= error * upper[before, before + 1 :]
    own = float(rounded[row, column])
    return abs(float(values[column]) - (own + other) / 2) / abs(own - other)


def compare(name: str, args: QuantArgs, rows: int, *, has_nan: bool = False) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, COLUMNS, generator=generator)
    # Where rows share a scale, the values of these rows are subnormal numbers of FP8.
    weight[1] *= 2**-13
    weight[2] *= 2**-16
    inputs = torch.randn(4 * COLUMNS, COLUMNS, generator=generator)
    inputs[:, DEAD] = 0
    factor = factorize(inputs.T @ inputs, GPTQ.ridge)
    assert factor is not None
    assert factor.dead == 1
    grid = grid_for(args, weight)
    if has_nan:
        weight[NOT_A_NUMBER] = math.nan
    ordered = weight[:, factor.order].contiguous()
    expected, found = ordered.clone(), ordered.clone()
    round_compiled(expected, factor, grid)
    round_tiles(found, factor, grid)
    differs = ~((expected == found) | (expected.isnan() & found.isnan()))
    distances = []
    for row in differs.any(1).nonzero().flatten().tolist():
        column = int(differs[row].nonzero()[0])
        other = float(found[row, column])
        distances.append(distance_to_tie(ordered, expected, other, column, factor, row))
    return {"name": name, "rows": rows, "distances": distances, "nan": int(found.isnan().sum())}


def main() -> None:
    for name, args in arguments():
        print(json.dumps(compare(name, args, ROWS)), flush=True)
    integers = dict(arguments())["INT4"]
    print(json.dumps(compare("few rows", integers, FEW_ROWS)))
    print(json.dumps(compare("NaN", integers, ROWS, has_nan=True)))


if __name__ == "__main__":
    main()
