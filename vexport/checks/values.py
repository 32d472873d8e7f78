"""Are the numbers usable? vLLM never looks at them."""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.dtypes import BITS
from vexport.checks.tensors import scales
from vexport.checks.tensors.codes import lost, unfilled
from vexport.checks.tensors.inputs import impossible
from vexport.checks.tensors.kept import empty
from vexport.checks.tensors.payloads import beyond, not_finite
from vexport.checks.tensors.plausible import global_scale_size, implausible, input_scale_size
from vexport.checks.tensors.scales import LAYER_SCALES, MANY
from vexport.checks.vllm.arguments import ConfigGroup
from vexport.checks.vllm.view import CheckpointView, FusedLinear, error, warning
from vexport.numerics.constants import E8M0_NAN
from vexport.types import Finding, TensorInfo

NAME = "values"
DESCRIPTION = "no NaN or infinity anywhere, every scale above zero and of a plausible size"
# AutoRound uses the lowest code of symmetric integers, which has no counterpart: where the largest weight
# of a group is positive its scale is negative, as in about half of them. Fewer of either sign: an accident.
LEAST_OF_EITHER_SIGN = 0.02
# Layers whose scales are being read while those of one are looked at: a disk or server answers them at once.
AHEAD = 32


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on scales that are NaN, infinite, zero, negative or implausible, and on payloads."""
    for number, fused in enumerate(view.fused_linears):
        for later in view.fused_linears[number + AHEAD : number + AHEAD + 1]:
            view.reader.expect(_scales_of(later))
        group = view.group_of(fused)
        broken = False
        for parameters in fused.members.values():
            for parameter in LAYER_SCALES:
                if (
                    parameter in parameters
                    and parameters[parameter].dtype in BITS
                    and parameters[parameter].num_bytes
                ):
                    findings = list(_scale(view, parameter, parameters, group))
                    broken = broken or any(finding.severity == "error" for finding in findings)
                    yield from findings
        if group is not None and not broken:
            yield from implausible(view, NAME, fused, group)
            yield from impossible(view, NAME, group, fused.members)
            for parameters in fused.members.values():
                yield from beyond(view, NAME, group, parameters)
        for parameters in fused.members.values():
            view.reader.release(parameters.values())
    yield from unfilled(view, NAME)
    yield from lost(view, NAME)
    yield from empty(view, NAME)
    yield from not_finite(view, NAME)


def _scales_of(fused: FusedLinear) -> Iterator[TensorInfo]:
    for parameters in fused.members.values():
        yield from (parameters[name] for name in LAYER_SCALES if name in parameters)


def _scale(
    view: CheckpointView, parameter: str, parameters: Mapping[str, TensorInfo], group: ConfigGroup | None
) -> Iterator[Finding]:
    tensor = parameters[parameter]
    if tensor.dtype in ("U8", "F8_E8M0"):
        codes = np.frombuffer(view.reader.raw(tensor), dtype=np.uint8)
        bad = int(np.count_nonzero(codes == E8M0_NAN))
        if bad:
            yield _bad(tensor, f"{bad} of {codes.size} values NaN (e8m0 255)")
        return
    if parameter == "weight_scale" and scales.above_zero(view.reader, tensor):
        return
    numbers = scales.numbers(view.reader, tensor)
    wrong = {
        "NaN": int(np.count_nonzero(np.isnan(numbers))),
        "infinite": int(np.count_nonzero(np.isinf(numbers))),
        "zero": 0 if _scales_zeros(view, numbers, parameters) else int(np.count_nonzero(numbers == 0)),
        "negative": 0 if _may_be_negative(numbers, parameter, group) else int(np.count_nonzero(numbers < 0)),
    }
    problems = [f"{count} of {numbers.size} values {kind}" for kind, count in wrong.items() if count]
    if problems:
        yield _bad(tensor, ", ".join(problems))
    elif parameter.endswith("global_scale"):
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


def _may_be_negative(numbers: npt.NDArray[np.float64], parameter: str, group: ConfigGroup | None) -> bool:
    """Whether signs change nothing, or are meant."""
    of_float_inputs = group is not None and group.weights.is_float and parameter == "input_scale"
    return of_float_inputs or _has_signs(numbers, parameter, group)


def _has_signs(numbers: npt.NDArray[np.float64], parameter: str, group: ConfigGroup | None) -> bool:
    """Whether scales of integers are of either sign on purpose; vLLM multiplies with them as they are."""
    if group is None or group.weights.is_float or parameter != "weight_scale" or numbers.size < MANY:
        return False
    fewest = min(np.count_nonzero(numbers < 0), np.count_nonzero(numbers > 0))
    return bool(fewest >= LEAST_OF_EITHER_SIGN * numbers.size)


def _scales_zeros(
    view: CheckpointView, numbers: npt.NDArray[np.float64], parameters: Mapping[str, TensorInfo]
) -> bool:
    """Whether what the zeros of a scale multiply is zero anyway: rows of a weight, or groups in it."""
    weight = parameters.get("weight_packed", parameters.get("weight"))
    zero = numbers == 0
    if weight is None or not zero.any() or numbers.ndim != 2 or len(weight.shape) != 2:
        return False
    rows, groups = numbers.shape
    if rows != weight.shape[0] or weight.shape[1] % max(groups, 1) or weight.dtype not in ("U8", "I8"):
        return False
    codes = np.frombuffer(view.reader.raw(weight), np.uint8).reshape(rows, groups, -1)[zero]
    # FP4 has a zero of either sign, in either half of the byte.
    return not (codes & 0x77 if weight.dtype == "U8" else codes).any()


def _bad(tensor: TensorInfo, got: str) -> Finding:
    fix = "export again, and look at this layer's weight and calibration"
    return error(NAME, tensor.name, expected="finite scales above zero", got=got, fix=fix)
