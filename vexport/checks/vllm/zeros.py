"""Find weights, rows and groups that contain only zeros. Any scale is valid for them.

Depth expansion starts with layers of zeros, pruning creates zero rows and zero experts, and padding
adds zero rows and experts, too. Producers store different scales for these parts: zero, a dtype's
epsilon, one, or an arbitrary scale. The functions therefore look at the codes: a part is called
empty if all its codes stand for zero.
"""

import re

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.dtypes import BITS
from vexport.checks.vllm.groups import StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.formats.arguments import QuantArgs
from vexport.numerics import INT32_BITS
from vexport.records import TensorInfo

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
# Number of values of a weight that are decoded at once.
VALUES_AT_ONCE = 1 << 22
# The bits of a code without its sign.
MAGNITUDE = {"F8_E4M3": 0x7F, "F8_E5M2": 0x7F}
# Maps the last part of a layer's name to a pattern. The pattern matches the layers of the same
# block that compute the layer's input.
SOURCES_OF_INPUT = {
    "down_proj": re.compile(r"(gate|up|gate_up)_proj"),
    "w2": re.compile(r"w1|w3|w13"),
    "o_proj": re.compile(r"(v|qkv)_proj"),
}


def empty_parts(view: CheckpointView, layer: StoredLayer, scale: TensorInfo) -> Flags | None:
    """Return a flag for each element of a weight's scale: True if all its weights are zero.

    The flags have the shape of the scale. Returns None if the layout of the layer's tensors is
    unknown.
    """
    shape, weight = _shape(view, layer), layer.weight
    if shape is None or layer.group is None or weight is None or not weight.num_bytes:
        return None
    args = layer.group.weights
    part_rows, part_columns = _part_sizes(scale.shape, shape, args)
    if not part_rows or not part_columns or weight.dtype == "I32" and args.num_bits > BITS["I8"]:
        return None
    rows, columns = shape
    parts = -(-rows // part_rows), -(-columns // part_columns)
    empty = np.ones(parts, np.bool_)
    step = max(VALUES_AT_ONCE // max(columns, 1), 1)
    for start in range(0, rows, step):
        numbers = range(start, min(start + step, rows))
        filled = _nonzero_flags(view, layer, args, numbers, columns)
        if filled is None:
            return None
        filled_parts = np.logical_or.reduceat(filled, np.arange(0, columns, part_columns), axis=1)
        np.logical_and.at(empty, np.asarray(numbers) // part_rows, ~filled_parts)
        view.reader.release([weight])
    return empty.reshape(scale.shape) if empty.size == np.prod(scale.shape, dtype=int) else None


def is_empty(view: CheckpointView, layer: StoredLayer) -> bool:
    """Return True if a layer's weight is all zero."""
    scale = layer.filled("weight_scale")
    empty = empty_parts(view, layer, scale) if scale is not None else None
    return empty is not None and bool(empty.all())


def input_is_zero(view: CheckpointView, layer: StoredLayer) -> bool:
    """Return True if a layer's input is always zero, because an all-zero layer computes it."""
    holder, dot, last_part = layer.name.rpartition(".")
    pattern = SOURCES_OF_INPUT.get(last_part)
    if pattern is None:
        return False
    siblings = (
        other
        for name, other in view.layers.by_name.items()
        if name.startswith(f"{holder}{dot}")
        and pattern.fullmatch(name.removeprefix(f"{holder}{dot}"))
    )
    return any(is_empty(view, other) for other in siblings)


def _shape(view: CheckpointView, layer: StoredLayer) -> tuple[int, int] | None:
    """Return (out_features, in_features) of the stored tensors, even if the config differs."""
    return layer.group.shape(layer.parameters) if layer.group is not None else None


def _part_sizes(
    stored: tuple[int, ...], shape: tuple[int, int], args: QuantArgs
) -> tuple[int, int]:
    """Return the numbers of rows and columns of a weight that share a scale.

    Returns (0, 0) if the scale's shape does not fit the weight.
    """
    rows, columns = shape
    if all(side == 1 for side in stored) and args.strategy == "tensor":
        return rows, columns
    if len(stored) not in (1, 2):
        return 0, 0
    part_rows, part_columns = args.block or (1, args.group or columns)
    parts = -(-rows // part_rows), -(-columns // part_columns)
    return (part_rows, part_columns) if stored == parts or (*stored, 1) == parts else (0, 0)


def _nonzero_flags(
    view: CheckpointView, layer: StoredLayer, args: QuantArgs, numbers: range, columns: int
) -> Flags | None:
    """Return a flag for each value of some rows of a weight: True if it is not zero.

    Returns None if the layout is unknown.
    """
    weight = layer.weight
    assert weight is not None
    stored = view.reader.rows(weight, list(numbers))
    zeros = _zero_points(view, layer, args, numbers, columns)
    if weight.dtype == "U8":  # two FP4 codes per byte; each has a positive and a negative zero
        filled = np.stack([stored & 0x7, stored >> 4 & 0x7], axis=2).reshape(len(stored), -1) != 0
    elif weight.dtype in MAGNITUDE:
        filled = stored & np.uint8(MAGNITUDE[weight.dtype]) != 0
    elif weight.dtype == "I8" and zeros is not None:
        filled = stored.view(np.int8) != zeros
    elif weight.dtype == "I32" and zeros is not None:
        filled = _unpacked(stored, args.num_bits, columns) != zeros
    else:
        return None
    return filled if filled.shape[1] == columns else None


def _zero_points(
    view: CheckpointView, layer: StoredLayer, args: QuantArgs, numbers: range, columns: int
) -> npt.NDArray[np.int16] | None:
    """Return the codes that stand for zero in some rows, in a shape that broadcasts to the rows.

    Returns None if the layout of the zero points is unknown.
    """
    packed = layer.weight is not None and layer.weight.dtype == "I32"
    middle = 1 << args.num_bits - 1 if packed else 0
    tensor = layer.filled("weight_zero_point")
    if args.symmetric or tensor is None:
        return np.full((1, 1), middle, np.int16) if args.symmetric else None
    groups = -(-columns // (args.group or columns))
    if packed and tensor.dtype == "I32" and len(tensor.shape) == 2 and tensor.shape[1] == groups:
        words = np.frombuffer(view.reader.raw(tensor), np.uint8).reshape(*tensor.shape, 4)
        rows = tensor.shape[0] * INT32_BITS // args.num_bits
        codes = _unpacked(words.transpose(1, 0, 2).reshape(groups, -1), args.num_bits, rows).T
    elif tensor.dtype == "I8" and tensor.shape[1:] in ((), (groups,)):
        stored = np.frombuffer(view.reader.raw(tensor), np.int8).reshape(tensor.shape[0], -1)
        codes = stored.astype(np.int16) + np.int16(middle)
    else:
        return None
    if len(codes) < numbers.stop:
        return None
    return np.repeat(codes[numbers.start : numbers.stop], -(-columns // codes.shape[1]), axis=1)[
        :, :columns
    ]


def _unpacked(stored: Bytes, num_bits: int, count: int) -> npt.NDArray[np.int16]:
    """Return the first `count` codes of each row (rows, bytes). Codes are stored without gaps."""
    bits = np.unpackbits(stored, axis=1, bitorder="little", count=count * num_bits)
    weights = (1 << np.arange(num_bits)).astype(np.int16)
    return bits.reshape(len(stored), count, num_bits).astype(np.int16) @ weights
