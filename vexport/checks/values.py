"""Are the numbers usable? vLLM never looks at them."""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.dtypes import BITS, to_numpy
from vexport.checks.tensors.codes import ranges, read_ahead
from vexport.checks.tensors.inputs import impossible
from vexport.checks.tensors.numbers import (
    E4M3_NAN,
    LAYER_SCALES,
    MANY,
    PLACEHOLDER,
    beyond,
    empty,
    ends_of,
    is_zero,
    middling,
    not_finite,
    numbers,
    positive_ends,
)
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.layers import FusedLinear
from vexport.checks.vllm.view import CheckpointView, error, warning
from vexport.formats import NVFP4
from vexport.numerics.constants import E2M1_MAX, E4M3_MAX, E8M0_NAN, GLOBAL_SCALE_NUMERATOR
from vexport.records import Finding, TensorInfo

NAME = "values"
DESCRIPTION = "no NaN or infinity in weights and scales, every scale above zero and of a plausible size"
# AutoRound uses the lowest code of symmetric integers, which has no counterpart: where the largest weight
# of a group is positive its scale is negative, as in about half of them. Fewer of either sign: an accident.
LEAST_OF_EITHER_SIGN = 0.02
# Rows of a weight that are looked at together where its scales are zero.
ROWS_OF_ZEROS = 128
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


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on scales that are NaN, infinite, zero, negative or implausible, and on payloads."""
    known = [fused for fused in view.fused_linears if any(map(view.is_read, fused.members))]
    for fused in read_ahead(known, lambda later: view.reader.expect(each[-1] for each in _scales_of(later))):
        group = view.group_of(fused)
        broken, ends = False, dict[str, tuple[float, float]]()
        for parameter, parameters, tensor in _scales_of(fused):
            if tensor.dtype in BITS and tensor.num_bytes:
                findings = list(_scale(view, parameter, parameters, group, ends))
                broken = broken or any(finding.severity == "error" for finding in findings)
                yield from findings
        if group is not None and not broken:
            yield from _implausible(view, fused, group, ends)
            yield from impossible(view, group, fused.members)
            for parameters in fused.members.values():
                yield from beyond(view, group, parameters)
        for parameters in fused.members.values():
            view.reader.release(parameters.values())
    yield from ranges(view)
    yield from empty(view)
    yield from not_finite(view)


def _scales_of(fused: FusedLinear) -> Iterator[tuple[str, Mapping[str, TensorInfo], TensorInfo]]:
    """Every scale by its name within its layer, next to the layer's tensors."""
    for parameters in fused.members.values():
        yield from ((name, parameters, parameters[name]) for name in LAYER_SCALES if name in parameters)


def _scale(
    view: CheckpointView,
    parameter: str,
    parameters: Mapping[str, TensorInfo],
    group: ConfigGroup | None,
    ends: dict[str, tuple[float, float]],
) -> Iterator[Finding]:
    """Findings on a scale; of a sound weight scale the least and the largest number go to `ends`."""
    tensor = parameters[parameter]
    if tensor.dtype in ("U8", "F8_E8M0"):
        codes = np.frombuffer(view.reader.raw(tensor), dtype=np.uint8)
        bad = int(np.count_nonzero(codes == E8M0_NAN))
        if bad:
            yield _bad(tensor, f"{bad} of {codes.size} values NaN (e8m0 255)")
        return
    if parameter == "weight_scale" and (positive := positive_ends(view.reader, tensor)):
        ends[tensor.name] = positive
        return
    values = numbers(view.reader, tensor)
    kinds = np.isnan(values), np.isinf(values), values == 0, values < 0
    counts = (int(np.count_nonzero(kind)) for kind in kinds)
    wrong = dict(zip(("NaN", "infinite", "zero", "negative"), counts, strict=True))
    if _may_be_negative(values, parameter, group):
        wrong["negative"] = 0
    if wrong["zero"] and _scales_zeros(view, tensor, parameters):
        wrong["zero"] = 0
    problems = [f"{count} of {values.size} values {kind}" for kind, count in wrong.items() if count]
    if problems:
        yield _bad(tensor, ", ".join(problems))
    elif parameter.endswith("global_scale"):
        yield from _global_scale_size(tensor, parameter, float(values.max()))
    elif parameter == "input_scale":
        if values.min() < 0:
            got = "a negative one, whose sign cancels: inputs are divided by it and products multiplied"
            fix = "store its magnitude"
            yield warning(NAME, tensor.name, expected="a scale above zero", got=got, fix=fix)
        yield from _input_scale_size(tensor, float(np.abs(values).max()))


def _may_be_negative(values: npt.NDArray[np.float64], parameter: str, group: ConfigGroup | None) -> bool:
    """Signs change nothing of float inputs; of integers they are meant where both are frequent: vLLM
    multiplies with them as they are."""
    if group is None or group.weights.is_float:
        return group is not None and parameter == "input_scale"
    rarer = min(int(np.count_nonzero(values < 0)), int(np.count_nonzero(values > 0)))
    return parameter == "weight_scale" and values.size >= MANY and rarer >= LEAST_OF_EITHER_SIGN * values.size


def _scales_zeros(view: CheckpointView, scale: TensorInfo, parameters: Mapping[str, TensorInfo]) -> bool:
    """Return whether what the zeros of a scale multiply is zero anyway: rows of a weight, or groups in it."""
    weight = parameters.get("weight_packed", parameters.get("weight"))
    if weight is None or len(scale.shape) != 2 or len(weight.shape) != 2:
        return False
    (rows, groups), width = scale.shape, weight.shape[1]
    if rows != weight.shape[0] or width % max(groups, 1) or weight.dtype not in ("U8", "I8"):
        return False
    if view.reader.is_hole(weight):
        return True
    zero = numbers(view.reader, scale) == 0
    within = np.flatnonzero(zero.any(axis=1))
    for start in range(0, within.size, ROWS_OF_ZEROS):
        some = within[start : start + ROWS_OF_ZEROS]
        codes = view.reader.rows(weight, some.tolist()).reshape(some.size, groups, -1)[zero[some]]
        # FP4 has a zero of either sign, in either half of the byte.
        if (codes & 0x77 if weight.dtype == "U8" else codes).any():
            return False
    return True


def _bad(tensor: TensorInfo, got: str) -> Finding:
    fix = "export again, and look at this layer's weight and calibration"
    return error(NAME, tensor.name, expected="finite scales above zero", got=got, fix=fix)


def _implausible(
    view: CheckpointView, fused: FusedLinear, group: ConfigGroup, ends: Mapping[str, tuple[float, float]]
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
        least, largest[module] = ends.get(scale.name) or ends_of(view.reader, scale)
        if size >= MANY and least == largest[module] and not group.storage.exponent_scales:
            yield _wrong_size(scale, f"{size} times {least:g}")
            continue
        typical = _typical(view, group, parameters, middling(view.reader, scale))
        if not LEAST_TYPICAL <= typical <= MOST_TYPICAL and not _is_empty(view, parameters):
            yield _wrong_size(scale, f"scales that make a typical weight {typical:.3g}")
    nvfp4 = group.storage is NVFP4
    if nvfp4 and largest and max(largest.values()) < LEAST_LARGEST_BLOCK:
        first = fused.members[next(iter(largest))]["weight_scale"]
        yield _wrong_size(
            first, f"no scale above {max(largest.values()):g}, where 448 is the largest block's"
        )
    elif nvfp4:
        for module, value in largest.items():
            if value < 1:
                tensor = fused.members[module]["weight_scale"]
                yield _wrong_size(tensor, f"no scale above {value:g}, next to {max(largest.values()):g}")


def _global_scale_size(tensor: TensorInfo, parameter: str, value: float) -> Iterator[Finding]:
    """A global scale of weights or inputs: 448*6/absmax."""
    of_weight = parameter.startswith("weight")
    least = LEAST_WEIGHT_GLOBAL_SCALE if of_weight else LEAST_INPUT_GLOBAL_SCALE
    if value < least:
        expected = f"a global scale (448*6/absmax) of at least {least:g}"
        got = f"{value:g}, which looks like its reciprocal"
        yield error(NAME, tensor.name, expected=expected, got=got, fix="store 1/value, or export again")
    elif value == PLACEHOLDER:
        yield _wrong_size(tensor, "1, which no calibration gives")
    elif not of_weight and value > GLOBAL_SCALE_NUMERATOR / LEAST_INPUT:
        yield _wrong_size(tensor, f"{value:g}, for inputs no larger than {GLOBAL_SCALE_NUMERATOR / value:g}")


def _input_scale_size(tensor: TensorInfo, value: float) -> Iterator[Finding]:
    """A static scale of e4m3 or of integers, which reach 127."""
    if value * E4M3_MAX > MOST_INPUT or value * E4M3_MAX < LEAST_INPUT:
        yield _wrong_size(tensor, f"{value:g}, for inputs as large as {value * E4M3_MAX:g}")
    elif value == PLACEHOLDER:
        yield _wrong_size(tensor, "1, which no calibration gives")


def _typical(
    view: CheckpointView, group: ConfigGroup, parameters: Mapping[str, TensorInfo], scale: float
) -> float:
    """A middling weight of a layer: of a quarter of the largest code, or for e4m3 of the mean code."""
    args = group.weights
    global_scale = parameters.get("weight_global_scale")
    if global_scale is not None and global_scale.num_bytes:
        scale /= float(numbers(view.reader, global_scale).max())
    weight = parameters.get("weight")
    if not args.is_float or weight is None or weight.dtype != "F8_E4M3" or not weight.num_bytes:
        return scale * (E2M1_MAX if args.is_float else 2.0 ** (args.num_bits - 1)) / 4
    codes = np.frombuffer(view.reader.raw(weight), np.uint8)[: 1 << 16]
    magnitudes = np.abs(_E4M3[codes[codes & 0x7F != E4M3_NAN]])
    return scale * float(magnitudes.mean()) if magnitudes.size else scale


def _is_empty(view: CheckpointView, parameters: Mapping[str, TensorInfo]) -> bool:
    """Return whether a weight is all zero, so that its scales mean nothing."""
    weight = parameters.get("weight_packed", parameters.get("weight"))
    if weight is None or not weight.num_bytes:
        return False
    return is_zero(view, weight)


def _wrong_size(tensor: TensorInfo, got: str) -> Finding:
    fix = "export again: these numbers are no scales of this layer, or upside down"
    return error(NAME, tensor.name, expected="scales of a plausible size", got=got, fix=fix)
