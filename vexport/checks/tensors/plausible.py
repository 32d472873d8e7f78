"""Scales of a size that no model has: reciprocals, placeholders, other numbers in their place."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from vexport.checkpoint.dtypes import BITS, to_numpy
from vexport.checks.tensors import scales
from vexport.checks.tensors.payloads import is_zero
from vexport.checks.tensors.scales import MANY, PLACEHOLDER
from vexport.checks.vllm.arguments import ConfigGroup
from vexport.checks.vllm.view import CheckpointView, FusedLinear, error
from vexport.formats import NVFP4
from vexport.numerics.constants import E2M1_MAX, E4M3_MAX, GLOBAL_SCALE_NUMERATOR
from vexport.types import Finding, TensorInfo

# 448*6/absmax is below 1 only for absmax above 2688: no weight is that large, so it is a reciprocal.
# Inputs reach float16's largest value, 65504, at most.
LEAST_WEIGHT_GLOBAL_SCALE = 1.0
LEAST_INPUT_GLOBAL_SCALE = 0.04
MOST_INPUT = 65504.0
# The typical weight of a layer, told from its scales: trained models have 1e-3 to 0.5.
LEAST_TYPICAL, MOST_TYPICAL = 1e-5, 1.25
# NVFP4's largest block of a layer, or of the layers that share a global scale, has the scale 448. Searches
# for less error end lower, other numbers in the place of scales much lower.
LEAST_LARGEST_BLOCK = E4M3_MAX / 8
# The least that the largest input of a layer may be.
LEAST_INPUT = 1e-3
_E4M3 = to_numpy(bytes(range(256)), "F8_E4M3").astype(np.float64)


def implausible(
    view: CheckpointView,
    check: str,
    fused: FusedLinear,
    group: ConfigGroup,
    ends: Mapping[str, tuple[float, float]],
) -> Iterator[Finding]:
    """Scales that make weights of a size that no model has; `ends` has the least and the largest of some."""
    largest: dict[str, float] = {}
    for module, parameters in fused.members.items():
        scale = parameters.get("weight_scale")
        if scale is None or scale.dtype not in BITS or not scale.num_bytes:
            continue
        if scale.dtype != "U8" and group.storage.exponent_scales:
            continue
        size = math.prod(scale.shape)
        least, largest[module] = ends.get(scale.name) or scales.ends(view.reader, scale)
        if size >= MANY and least == largest[module] and not group.storage.exponent_scales:
            yield _finding(check, scale, f"{size} times {least:g}")
            continue
        typical = _typical(view, group, parameters, scales.middling(view.reader, scale))
        if not LEAST_TYPICAL <= typical <= MOST_TYPICAL and not _is_empty(view, parameters):
            yield _finding(check, scale, f"scales that make a typical weight {typical:.3g}")
    nvfp4 = group.storage is NVFP4
    if nvfp4 and largest and max(largest.values()) < LEAST_LARGEST_BLOCK:
        first = fused.members[next(iter(largest))]["weight_scale"]
        yield _finding(
            check, first, f"no scale above {max(largest.values()):g}, where 448 is the largest block's"
        )
    elif nvfp4:
        for module, value in largest.items():
            if value < 1:
                tensor = fused.members[module]["weight_scale"]
                yield _finding(check, tensor, f"no scale above {value:g}, next to {max(largest.values()):g}")


def global_scale_size(check: str, tensor: TensorInfo, parameter: str, value: float) -> Iterator[Finding]:
    """A global scale of weights or inputs: 448*6/absmax."""
    of_weight = parameter.startswith("weight")
    least = LEAST_WEIGHT_GLOBAL_SCALE if of_weight else LEAST_INPUT_GLOBAL_SCALE
    if value < least:
        yield error(
            check,
            tensor.name,
            expected=f"a global scale (448*6/absmax) of at least {least:g}",
            got=f"{value:g}, which looks like its reciprocal",
            fix="store 1/value, or export again",
        )
    elif value == PLACEHOLDER:
        yield _finding(check, tensor, "1, which no calibration gives")
    elif not of_weight and value > GLOBAL_SCALE_NUMERATOR / LEAST_INPUT:
        yield _finding(
            check, tensor, f"{value:g}, for inputs no larger than {GLOBAL_SCALE_NUMERATOR / value:g}"
        )


def input_scale_size(check: str, tensor: TensorInfo, value: float) -> Iterator[Finding]:
    """A static scale of e4m3 or of integers, which reach 127."""
    if value * E4M3_MAX > MOST_INPUT or value * E4M3_MAX < LEAST_INPUT:
        yield _finding(check, tensor, f"{value:g}, for inputs as large as {value * E4M3_MAX:g}")
    elif value == PLACEHOLDER:
        yield _finding(check, tensor, "1, which no calibration gives")


def _typical(
    view: CheckpointView, group: ConfigGroup, parameters: Mapping[str, TensorInfo], scale: float
) -> float:
    """A middling weight of a layer: of a quarter of the largest code, or for e4m3 of the mean code."""
    args = group.weights
    global_scale = parameters.get("weight_global_scale")
    if global_scale is not None and global_scale.num_bytes:
        scale /= float(scales.numbers(view.reader, global_scale).max())
    weight = parameters.get("weight")
    if not args.is_float or weight is None or weight.dtype != "F8_E4M3" or not weight.num_bytes:
        return scale * (E2M1_MAX if args.is_float else 2.0 ** (args.num_bits - 1)) / 4
    codes = np.frombuffer(view.reader.raw(weight), np.uint8)[: 1 << 16]
    magnitudes = np.abs(_E4M3[codes[codes & 0x7F != scales.E4M3_NAN]])
    return scale * float(magnitudes.mean()) if magnitudes.size else scale


def _is_empty(view: CheckpointView, parameters: Mapping[str, TensorInfo]) -> bool:
    """Whether a weight is all zero, so that its scales mean nothing."""
    weight = parameters.get("weight_packed", parameters.get("weight"))
    if weight is None or not weight.num_bytes:
        return False
    return is_zero(view, weight)


def _finding(check: str, tensor: TensorInfo, got: str) -> Finding:
    return error(
        check,
        tensor.name,
        expected="scales of a plausible size",
        got=got,
        fix="export again: these numbers are no scales of this layer, or upside down",
    )
