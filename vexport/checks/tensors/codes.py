"""Codes that do not fill their range, where those of all other layers do, and ranges without any code.

The scale of a row or group is made for its largest value, which then has the largest code. Where a weight is
transposed, or has another layer's scales by groups of codes, that is no longer so. Observers and GPTQ may
leave ranges unfilled: a layer is judged only where all others fill theirs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.dtypes import to_numpy
from vexport.checks.tensors.numbers import CHECK
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.layers import FusedLinear
from vexport.checks.vllm.view import CheckpointView, error
from vexport.records import Finding, TensorInfo

# Rows of a layer that are looked at, from all over it: fewer where there are thousands of layers.
FEWEST_ROWS, MOST_ROWS, ROWS_OF_ALL = 16, 128, 1 << 16
# Of a random permutation of the codes about a third of the rows, a quarter of the groups of 16 are not full.
MOST_FULL, LEAST_FULL = 0.85, 0.99
FEWEST_OTHERS = 6
WEIGHTS = ("weight_packed", "weight")
Rows = npt.NDArray[np.uint8]
# What scales of nothing are: eps of bfloat16, float16, float32 and e4m3, and one.
PLACEHOLDERS = (2.0**-7, 2.0**-10, 2.0**-23, 2.0**-3, 1.0)
LEAST_USUAL, MOST_LOST = 1 / 16, 0.01
# So many layers are being read while one is looked at: a disk or server answers them at once.
AHEAD = 32


def ranges(view: CheckpointView) -> Iterator[Finding]:
    """Findings on ranges of codes: the one layer whose ranges are not filled, and ranges that are empty."""
    full: dict[str, float] = {}
    findings = []
    for module, group, parameters in _quantized(view):
        stored: dict[str, Rows] = {}
        share = _share(view, group, parameters, stored)
        if share is not None:
            full[module] = share
        empty = _lost_share(view, group, parameters, stored)
        if empty is not None and empty > MOST_LOST:
            findings.append(_lost(module, empty))
    few = [module for module, share in full.items() if share < LEAST_FULL]
    if len(few) == 1 and full[few[0]] < MOST_FULL and len(full) > FEWEST_OTHERS:
        expected = "codes that reach the end of their range for every scale, as in all other layers"
        got = f"{1 - full[few[0]]:.0%} of the ranges unfilled"
        fix = "export it again: the weight is transposed, or these are another weight's codes"
        yield error(CHECK, few[0], expected=expected, got=got, fix=fix)
    yield from findings


def _lost(module: str, share: float) -> Finding:
    """Rows and groups whose codes are all zero, next to a scale that is made for other numbers.

    Where a weight is zero itself, producers store the least scale, or a number that stands for none.
    """
    expected = "codes other than zero where a scale of usual size is"
    fix = "download or export it again: a part of the weight is lost"
    return error(CHECK, module, expected=expected, got=f"{share:.0%} of the ranges empty", fix=fix)


def _quantized(view: CheckpointView) -> Iterator[tuple[str, ConfigGroup, Mapping[str, TensorInfo]]]:
    """Every layer that a config group applies to, that group, and the layer's tensors, which are released."""
    for fused in read_ahead(view.fused_linears, partial(_expect, view)):
        group = view.group_of(fused)
        if group is not None:
            for module, parameters in fused.members.items():
                yield module, group, parameters
                view.reader.release(parameters.values())


def _expect(view: CheckpointView, fused: FusedLinear) -> None:
    """Begin to read the rows of a layer that will be looked at."""
    for parameters in fused.members.values() if view.group_of(fused) is not None else ():
        for tensor in (parameters[name] for name in WEIGHTS if name in parameters):
            view.reader.expect_some_rows(tensor, _step(view, tensor))


def _lost_share(
    view: CheckpointView, group: ConfigGroup, parameters: Mapping[str, TensorInfo], stored: dict[str, Rows]
) -> float | None:
    """The share of scales of usual size that scale nothing; None where that cannot be told."""
    weight, scale = parameters.get("weight_packed", parameters.get("weight")), parameters.get("weight_scale")
    if weight is None or scale is None or len(weight.shape) != 2 or len(scale.shape) != 2:
        return None
    if group.weights.block or not weight.num_bytes:
        return None
    codes = _rows(view, weight, stored)
    if scale.shape[0] != weight.shape[0] or not scale.shape[1] or codes.shape[1] % scale.shape[1]:
        return None
    if weight.dtype in ("U8", "F8_E4M3"):
        codes = codes & np.uint8(0x77 if weight.dtype == "U8" else 0x7F)
    parts = _words(codes.reshape(codes.shape[0], scale.shape[1], -1))
    zeros = {0, int.from_bytes(bytes([_zero_codes(group, weight)]) * parts.itemsize, "little")}
    empty = np.any([(parts == zero).all(axis=2) for zero in zeros], axis=0)
    if not empty.any():
        return 0.0
    with np.errstate(invalid="ignore"):
        values = to_numpy(_rows(view, scale, stored).tobytes(), scale.dtype)
        scales = np.asarray(values, np.float64).reshape(-1, scale.shape[1])
    usual = (scales > np.median(scales) * LEAST_USUAL) & ~np.isin(scales, PLACEHOLDERS)
    return float((empty & usual).mean())


def _words(parts: npt.NDArray[np.uint8]) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Bytes as words of eight where they are whole ones."""
    return np.ascontiguousarray(parts).view(np.uint64) if parts.shape[2] % 8 == 0 else parts


def _zero_codes(group: ConfigGroup, weight: TensorInfo) -> int:
    """The byte of zeros, which in packed integers is half their range; the byte 0 is lost data there."""
    bits = group.weights.num_bits
    if weight.dtype != "I32" or bits not in (4, 8):
        return 0
    return 0x88 if bits == 4 else 0x80


def _share(
    view: CheckpointView, group: ConfigGroup, parameters: Mapping[str, TensorInfo], stored: dict[str, Rows]
) -> float | None:
    """The share of scales whose codes reach the end; None where that cannot be told."""
    storage, expected = group.storage, group.expected(parameters)
    weight = parameters.get(storage.weight)
    if weight is None or expected is None or not weight.num_bytes or not group.weights.symmetric:
        return None
    if weight.dtype not in expected[storage.weight].dtypes:
        return None
    found = storage.largest_codes(group, _rows(view, weight, stored))
    largest, end = found if found is not None else (np.zeros(0, np.uint8), 0)
    largest = largest[largest > 0]  # others are of rows or groups that are all zero
    return float((largest >= end).mean()) if largest.size else None


def _rows(view: CheckpointView, tensor: TensorInfo, stored: dict[str, Rows]) -> Rows:
    """Some rows of a tensor, as bytes, kept in `stored`; of tensors with as many rows the same ones."""
    if tensor.name not in stored:
        stored[tensor.name] = view.reader.some_rows(tensor, _step(view, tensor))
    return stored[tensor.name]


def _step(view: CheckpointView, tensor: TensorInfo) -> int:
    rows = min(max(ROWS_OF_ALL // len(view.fused_linears), FEWEST_ROWS), MOST_ROWS)
    return max(tensor.shape[0] // rows, 1)


def read_ahead(layers: Sequence[FusedLinear], begin: Callable[[FusedLinear], None]) -> Iterator[FusedLinear]:
    """The layers; before each, `begin` starts to read what is needed of the one that is AHEAD of it."""
    for number, layer in enumerate(layers):
        if number + AHEAD < len(layers):
            begin(layers[number + AHEAD])
        yield layer
