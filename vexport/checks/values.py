"""Are the numbers usable? vLLM never looks at them."""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.dtypes import BITS, to_numpy
from vexport.checks.tensors import scales
from vexport.checks.tensors.codes import lost, unfilled
from vexport.checks.tensors.inputs import impossible
from vexport.checks.tensors.kept import empty
from vexport.checks.tensors.scales import PLACEHOLDER
from vexport.checks.vllm.arguments import ConfigGroup
from vexport.checks.vllm.view import CheckpointView, FusedLinear, error, warning
from vexport.numerics.constants import E4M3_MAX, E8M0_NAN, GLOBAL_SCALE_NUMERATOR
from vexport.types import Finding, TensorInfo

NAME = "values"
DESCRIPTION = "no NaN or infinity anywhere, every scale above zero and of a plausible size"
SCALES = ("weight_scale", "weight_global_scale", "input_scale", "input_global_scale")
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
# Bits that are all set in NaN and infinity, by dtype: e4m3 has no infinity, and its NaN has them all.
NOT_FINITE = {"F8_E4M3": scales.E4M3_NAN, "F16": 0x7C00, "BF16": 0x7F80}
_E4M3 = to_numpy(bytes(range(256)), "F8_E4M3").astype(np.float64)
# So many scales of a layer are never all equal, but for exponents.
MANY = 16
# The least that the largest input of a layer may be.
LEAST_INPUT = 1e-3
# AutoRound uses the lowest code of symmetric integers, which has no counterpart: where the largest weight
# of a group is positive its scale is negative, as in about half of them. Fewer of either sign: an accident.
LEAST_OF_EITHER_SIGN = 0.02
# Elements that are looked at together.
RUN = 1 << 24


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on scales that are NaN, infinite, zero, negative or implausible, and on payloads."""
    for fused in view.fused_linears:
        group = view.group_of(fused)
        broken = False
        for parameters in fused.members.values():
            for parameter in SCALES:
                if (
                    parameter in parameters
                    and parameters[parameter].dtype in BITS
                    and parameters[parameter].num_bytes
                ):
                    findings = list(_scale(view, parameter, parameters, group))
                    broken = broken or any(finding.severity == "error" for finding in findings)
                    yield from findings
        if group is not None and not broken:
            yield from _plausible(view, fused, group)
            yield from impossible(view, NAME, group, fused.members)
            for parameters in fused.members.values():
                yield from _beyond(view, group, parameters)
        for parameters in fused.members.values():
            view.reader.release(parameters.values())
    yield from unfilled(view, NAME)
    yield from lost(view, NAME)
    yield from empty(view, NAME)
    yield from _not_finite(view)


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
    if parameter == "weight_scale" and tensor.dtype == "F8_E4M3" and scales.above_zero(view.reader, tensor):
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
        yield from _reciprocal(tensor, parameter, float(numbers.max()))
    elif parameter == "input_scale":
        if numbers.min() < 0:
            yield _odd_sign(tensor)
        yield from _input_scale(tensor, float(np.abs(numbers).max()))


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
    of_float_inputs = group is not None and group.weights.type == "float" and parameter == "input_scale"
    return of_float_inputs or _has_signs(numbers, parameter, group)


def _has_signs(numbers: npt.NDArray[np.float64], parameter: str, group: ConfigGroup | None) -> bool:
    """Whether scales of integers are of either sign on purpose; vLLM multiplies with them as they are."""
    if group is None or group.weights.type != "int" or parameter != "weight_scale" or numbers.size < MANY:
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


def _reciprocal(tensor: TensorInfo, parameter: str, value: float) -> Iterator[Finding]:
    of_weight = parameter.startswith("weight")
    least = LEAST_WEIGHT_GLOBAL_SCALE if of_weight else LEAST_INPUT_GLOBAL_SCALE
    if value < least:
        yield error(
            NAME,
            tensor.name,
            expected=f"a global scale (448*6/absmax) of at least {least:g}",
            got=f"{value:g}, which looks like its reciprocal",
            fix="store 1/value, or export again",
        )
    elif value == PLACEHOLDER:
        yield _implausible(tensor, "1, which no calibration gives")
    elif not of_weight and value > GLOBAL_SCALE_NUMERATOR / LEAST_INPUT:
        yield _implausible(tensor, f"{value:g}, for inputs no larger than {GLOBAL_SCALE_NUMERATOR / value:g}")


def _input_scale(tensor: TensorInfo, value: float) -> Iterator[Finding]:
    """A static scale of e4m3 or of integers, which reach 127."""
    if value * E4M3_MAX > MOST_INPUT or value * E4M3_MAX < LEAST_INPUT:
        yield _implausible(tensor, f"{value:g}, for inputs as large as {value * E4M3_MAX:g}")
    elif value == PLACEHOLDER:
        yield _implausible(tensor, "1, which no calibration gives")


def _plausible(view: CheckpointView, fused: FusedLinear, group: ConfigGroup) -> Iterator[Finding]:
    """Scales that make weights of a size that no model has."""
    largest: dict[str, float] = {}
    for module, parameters in fused.members.items():
        scale = parameters.get("weight_scale")
        if scale is None or scale.dtype not in BITS or not scale.num_bytes:
            continue
        if scale.dtype != "U8" and _is_mx(group):
            continue
        size, (least, largest[module]) = math.prod(scale.shape), scales.ends(view.reader, scale)
        if size >= MANY and least == largest[module] and not _is_mx(group):
            yield _implausible(scale, f"{size} times {least:g}")
            continue
        typical = _typical(view, group, parameters, scales.middling(view.reader, scale))
        if not LEAST_TYPICAL <= typical <= MOST_TYPICAL and not _is_empty(view, parameters):
            yield _implausible(scale, f"scales that make a typical weight {typical:.3g}")
    nvfp4 = group.weights.strategy == "tensor_group"
    if nvfp4 and largest and max(largest.values()) < LEAST_LARGEST_BLOCK:
        first = fused.members[next(iter(largest))]["weight_scale"]
        yield _implausible(
            first, f"no scale above {max(largest.values()):g}, where 448 is the largest block's"
        )
    elif nvfp4:
        for module, value in largest.items():
            if value < 1:
                tensor = fused.members[module]["weight_scale"]
                yield _implausible(tensor, f"no scale above {value:g}, next to {max(largest.values()):g}")


def _typical(
    view: CheckpointView, group: ConfigGroup, parameters: Mapping[str, TensorInfo], scale: float
) -> float:
    """A middling weight of a layer: of a quarter of the largest code, or for e4m3 of the mean code."""
    args = group.weights
    global_scale = parameters.get("weight_global_scale")
    if global_scale is not None and global_scale.num_bytes:
        scale /= float(scales.numbers(view.reader, global_scale).max())
    if args.type == "int":
        return scale * float(2 ** (args.num_bits - 1)) / 4
    weight = parameters.get("weight")
    if args.num_bits == 4 or weight is None or weight.dtype != "F8_E4M3" or not weight.num_bytes:
        return scale * 6 / 4
    codes = np.frombuffer(view.reader.raw(weight), np.uint8)[: 1 << 16]
    magnitudes = np.abs(_E4M3[codes[codes & 0x7F != NOT_FINITE["F8_E4M3"]]])
    return scale * float(magnitudes.mean()) if magnitudes.size else scale


def _is_empty(view: CheckpointView, parameters: Mapping[str, TensorInfo]) -> bool:
    """Whether a weight is all zero, so that its scales mean nothing."""
    weight = parameters.get("weight_packed", parameters.get("weight"))
    if weight is None or not weight.num_bytes:
        return False
    codes = np.frombuffer(view.reader.raw(weight), np.uint8)
    return not codes.any()


def _beyond(
    view: CheckpointView, group: ConfigGroup, parameters: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """Codes in bytes that the announced bits do not hold."""
    weight, half = parameters.get("weight"), 2 ** (group.weights.num_bits - 1)
    if group.weights.type != "int" or half >= 128 or weight is None or weight.dtype != "I8":
        return
    codes = np.frombuffer(view.reader.raw(weight), np.int8)
    bad = int(np.count_nonzero((codes >= half) | (codes < -half)))
    if bad:
        yield error(
            NAME,
            weight.name,
            expected=f"codes of {group.weights.num_bits} bits, from {-half} to {half - 1}",
            got=f"{bad} of {codes.size} beyond them",
            fix="correct num_bits",
        )


def _not_finite(view: CheckpointView) -> Iterator[Finding]:
    """NaN and infinity in payloads of e4m3 and in what is not quantized."""
    for tensor in view.index.tensors.values():
        if tensor.name.endswith(SCALES) or tensor.dtype not in (*NOT_FINITE, "F32"):
            continue
        bad = _count_not_finite(view, tensor)
        view.reader.release([tensor])
        if bad:
            yield error(
                NAME,
                tensor.name,
                expected="finite values",
                got=f"{bad} values NaN or infinite",
                fix="export again, and look at this tensor in the source",
            )


def _count_not_finite(view: CheckpointView, tensor: TensorInfo) -> int:
    size = BITS[tensor.dtype] // 8
    codes = np.frombuffer(view.reader.raw(tensor), dtype=f"<u{size}")
    mask = codes.dtype.type(NOT_FINITE.get(tensor.dtype, 0x7F800000))
    parts = (codes[start : start + RUN] for start in range(0, codes.size, RUN))
    return sum(int(np.count_nonzero((part & mask) == mask)) for part in parts)


def _bad(tensor: TensorInfo, got: str) -> Finding:
    fix = "export again, and look at this layer's weight and calibration"
    return error(NAME, tensor.name, expected="finite scales above zero", got=got, fix=fix)


def _implausible(tensor: TensorInfo, got: str) -> Finding:
    return error(
        NAME,
        tensor.name,
        expected="scales of a plausible size",
        got=got,
        fix="export again: these numbers are no scales of this layer, or upside down",
    )


def _is_mx(group: ConfigGroup) -> bool:
    """Whether scales are exponents in bytes."""
    return group.weights.type == "float" and group.weights.strategy == "group"
