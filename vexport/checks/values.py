"""Are the numbers usable? vLLM never looks at them."""

from collections.abc import Iterator, Mapping

import numpy as np

from vexport.checkpoint.dtypes import BITS
from vexport.checks.tensors import scales
from vexport.checks.tensors.ahead import read_ahead
from vexport.checks.tensors.codes import ranges
from vexport.checks.tensors.inputs import impossible
from vexport.checks.tensors.kept import empty
from vexport.checks.tensors.payloads import beyond, not_finite
from vexport.checks.tensors.plausible import global_scale_size, implausible, input_scale_size
from vexport.checks.tensors.scales import LAYER_SCALES, MANY, Counts
from vexport.checks.vllm.arguments import ConfigGroup
from vexport.checks.vllm.view import CheckpointView, FusedLinear, error, warning
from vexport.numerics.constants import E8M0_NAN
from vexport.types import Finding, TensorInfo

NAME = "values"
# Scales of which a layer has one number, or few.
SINGLE = ("weight_global_scale", "input_scale", "input_global_scale")
DESCRIPTION = "no NaN or infinity anywhere, every scale above zero and of a plausible size"
# AutoRound uses the lowest code of symmetric integers, which has no counterpart: where the largest weight
# of a group is positive its scale is negative, as in about half of them. Fewer of either sign: an accident.
LEAST_OF_EITHER_SIGN = 0.02
# Rows of a weight that are looked at together where its scales are zero.
ROWS_OF_ZEROS = 128


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on scales that are NaN, infinite, zero, negative or implausible, and on payloads."""
    for fused in read_ahead(view.fused_linears, lambda later: view.reader.expect(_scales_of(later))):
        group = view.group_of(fused)
        broken, ends = False, dict[str, tuple[float, float]]()
        for parameters in fused.members.values():
            for parameter in LAYER_SCALES:
                if (
                    parameter in parameters
                    and parameters[parameter].dtype in BITS
                    and parameters[parameter].num_bytes
                ):
                    findings = list(_scale(view, parameter, parameters, group, ends))
                    broken = broken or any(finding.severity == "error" for finding in findings)
                    yield from findings
        if group is not None and not broken:
            yield from implausible(view, NAME, fused, group, ends)
            yield from impossible(view, NAME, group, fused.members)
            for parameters in fused.members.values():
                yield from beyond(view, NAME, group, parameters)
        for parameters in fused.members.values():
            view.reader.release(parameters.values())
    yield from ranges(view, NAME)
    yield from empty(view, NAME)
    yield from not_finite(view, NAME)


def _scales_of(fused: FusedLinear) -> Iterator[TensorInfo]:
    for parameters in fused.members.values():
        yield from (parameters[name] for name in LAYER_SCALES if name in parameters)


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
    if parameter == "weight_scale" and (positive := scales.positive_ends(view.reader, tensor)):
        ends[tensor.name] = positive
        return
    found = scales.counts(view.reader, tensor)
    wrong = {
        "NaN": found.nan,
        "infinite": found.infinite,
        "zero": 0 if found.zero and _scales_zeros(view, tensor, parameters) else found.zero,
        "negative": 0 if _may_be_negative(found, parameter, group) else found.negative,
    }
    problems = [f"{count} of {found.size} values {kind}" for kind, count in wrong.items() if count]
    if problems:
        yield _bad(tensor, ", ".join(problems))
        return
    if parameter not in SINGLE:
        return
    numbers = scales.numbers(view.reader, tensor)
    if parameter.endswith("global_scale"):
        yield from global_scale_size(NAME, tensor, parameter, float(numbers.max()))
    elif parameter == "input_scale":
        if numbers.min() < 0:
            yield _odd_sign(tensor)
        yield from input_scale_size(NAME, tensor, float(np.abs(numbers).max()))


def _odd_sign(tensor: TensorInfo) -> Finding:
    return warning(
        NAME,
        tensor.name,
        expected="a scale above zero",
        got="a negative one, whose sign cancels: inputs are divided by it and products multiplied",
        fix="store its magnitude",
    )


def _may_be_negative(found: Counts, parameter: str, group: ConfigGroup | None) -> bool:
    """Whether signs change nothing, or are meant."""
    of_float_inputs = group is not None and group.weights.is_float and parameter == "input_scale"
    return of_float_inputs or _has_signs(found, parameter, group)


def _has_signs(found: Counts, parameter: str, group: ConfigGroup | None) -> bool:
    """Whether scales of integers are of either sign on purpose; vLLM multiplies with them as they are."""
    if group is None or group.weights.is_float or parameter != "weight_scale" or found.size < MANY:
        return False
    return min(found.negative, found.positive) >= LEAST_OF_EITHER_SIGN * found.size


def _scales_zeros(view: CheckpointView, scale: TensorInfo, parameters: Mapping[str, TensorInfo]) -> bool:
    """Whether what the zeros of a scale multiply is zero anyway: rows of a weight, or groups in it."""
    weight = parameters.get("weight_packed", parameters.get("weight"))
    if weight is None or len(scale.shape) != 2 or len(weight.shape) != 2:
        return False
    (rows, groups), width = scale.shape, weight.shape[1]
    if rows != weight.shape[0] or width % max(groups, 1) or weight.dtype not in ("U8", "I8"):
        return False
    if view.reader.is_hole(weight):
        return True
    zero = scales.numbers(view.reader, scale) == 0
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
