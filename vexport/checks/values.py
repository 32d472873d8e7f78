"""Check whether the stored numbers are usable. vLLM never checks them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from vexport.architectures import NUMBER
from vexport.architectures.fusion import FusedLayer
from vexport.checkpoint.dtypes import BITS, to_numpy
from vexport.checks.numbers import (
    E4M3_NAN,
    LAYER_SCALES,
    MANY_SCALES,
    PLACEHOLDER,
    all_zero_tensors,
    codes_out_of_range,
    impossible_input_scale,
    median_magnitude,
    not_finite,
    positive_range,
    scale_range,
    scale_values,
)
from vexport.checks.shards import values_not_judged
from vexport.checks.vllm.groups import ConfigGroup, StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.checks.vllm.zeros import empty_parts, input_is_zero, is_empty
from vexport.formats import NVFP4
from vexport.numerics import E2M1_MAX, E4M3_MAX, E8M0_NAN, GLOBAL_SCALE_NUMERATOR
from vexport.records import Finding, TensorInfo
from vexport.rules import values as rules
from vexport.words import plural

DESCRIPTION = (
    "weights and scales have no NaN or infinity, and scales are positive and of a plausible size"
)
# Negative scales are accepted if each sign has at least this share of a weight's scales. AutoRound
# stores a negative scale if the largest weight of a group is positive, which is true for about half
# of the groups. It thereby uses the lowest code of symmetric integers (such as -8), which has no
# positive counterpart. Rare negative scales are errors.
MIN_SIGN_SHARE = 0.02
# Smallest plausible global scales. A global scale is 448*6/absmax. A scale below 1 would mean an
# absmax above 2688, and no weight is that large: the stored value is probably a reciprocal.
MIN_WEIGHT_GLOBAL_SCALE = 1.0
MIN_INPUT_GLOBAL_SCALE = 0.04
# Largest plausible input of a layer: the largest value of float16.
MAX_INPUT = 65504.0
# Bounds of a layer's typical weight, estimated from its scales. Trained models have 1e-3 to 0.5.
MIN_TYPICAL, MAX_TYPICAL = 1e-5, 1.25
# Smallest plausible value of the largest block scale in NVFP4. If scales are absmax/6, the largest
# block scale under a global scale is 448. An observer that searches for the smallest error may
# choose a somewhat smaller scale. If the largest scale is much smaller, these are not NVFP4 scales.
MIN_LARGEST_BLOCK = E4M3_MAX / 8
# The smallest plausible value for the largest input of a layer.
MIN_INPUT = 1e-3
_E4M3 = to_numpy(bytes(range(256)), "F8_E4M3").astype(np.float64)
# Smallest and largest number of rows that are examined in a layer. The rows are evenly spread over
# the weight. ROWS_OF_ALL rows are examined in the whole model, the same number in each layer.
MIN_ROWS, MAX_ROWS, ROWS_OF_ALL = 16, 128, 1 << 16
# A scale is called full if one of its weights has a code at the end of the range (see
# `Format.largest_codes`). A layer is reported if its share of full scales is less than MAX_FULL,
# while the share in every other layer is at least MIN_FULL. If the codes of a layer are randomly
# permuted, the share of full scales falls to about 2/3 for scales per row, and to about 3/4 for
# scales per group of 16.
MAX_FULL, MIN_FULL = 0.85, 0.99
# The rule above only applies if the model has more layers than this.
MIN_OTHER_LAYERS = 6
# A layer is unusual if its typical weight is this many times as large as in every other layer with
# the same name but for numbers, or as small. In SmolLM2-135M the factor is at most 2.8.
MAX_FACTOR = 5.0
# Minimum number of such layers.
MIN_LAYERS = 3
WEIGHTS = ("weight_packed", "weight")
Rows = npt.NDArray[np.uint8]
# Scales that producers store for all-zero groups: eps of bfloat16, float16, float32 and e4m3, and
# 1.
PLACEHOLDERS = (2.0**-7, 2.0**-10, 2.0**-23, 2.0**-3, 1.0)
# A scale has a usual size if it is above MIN_USUAL times the median of the weight's scales. A part
# of the weight is lost if more than MAX_LOST of the scales have a usual size although all their
# codes are zero.
MIN_USUAL, MAX_LOST = 1 / 16, 0.01
# Number of layers that are read ahead, so that a disk or server can serve requests in parallel.
READ_AHEAD_LAYERS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSizes:
    """A layer's scales: their number, the smallest, the largest, and the typical weight size.

    Typical weights are only comparable between layers with the same `precision`: the bits of a
    weight and the stored dtypes.
    """

    scale: TensorInfo
    precision: str
    count: int
    least: float
    most: float
    typical: float


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on scales, codes and unquantized values that are invalid or implausible."""
    known = [
        fused for fused in view.model.fused_layers if any(map(view.model.has_module, fused.members))
    ]
    typical = dict[str, ScaleSizes]()
    for fused in read_ahead(known, partial(_prefetch_scales, view)):
        group, layers = view.lookup.group_of(fused), view.layers.members(fused)
        broken = False
        for layer, parameter in _scales_of(layers):
            tensor = layer.parameters[parameter]
            if tensor.dtype in BITS and tensor.num_bytes:
                findings = list(_scale(view, layer, parameter, tensor))
                broken = broken or any(finding.severity == "error" for finding in findings)
                yield from findings
        if group is not None and not broken:
            yield from _implausible_scales(view, layers, group, typical)
            for rule in (impossible_input_scale, codes_out_of_range):
                for layer in layers:
                    yield from rule(view, group, layer)
        for layer in layers:
            view.reader.release(layer.parameters.values())
    if next(values_not_judged(view), None) is not None:
        yield from _unusual_layers(typical)
    yield from code_range_findings(view)
    yield from all_zero_tensors(view)
    yield from not_finite(view)


def _prefetch_scales(view: CheckpointView, fused: FusedLayer) -> None:
    view.reader.prefetch(
        layer.parameters[name] for layer, name in _scales_of(view.layers.members(fused))
    )


def _scales_of(layers: Sequence[StoredLayer]) -> Iterator[tuple[StoredLayer, str]]:
    for layer in layers:
        yield from ((layer, name) for name in LAYER_SCALES if name in layer.parameters)


def _scale(
    view: CheckpointView, layer: StoredLayer, parameter: str, tensor: TensorInfo
) -> Iterator[Finding]:
    if tensor.dtype in ("U8", "F8_E8M0"):
        codes = np.frombuffer(view.reader.raw(tensor), dtype=np.uint8)
        bad = int(np.count_nonzero(codes == E8M0_NAN))
        if bad:
            invalid = [f"{plural(bad, 'NaN value')} (255 in e8m0)"]
            yield Finding.at(rules.INVALID_SCALE, tensor.name, invalid=invalid, count=codes.size)
        return
    if parameter == "weight_scale" and positive_range(view.reader, tensor):
        return
    values = scale_values(view.reader, tensor)
    if problems := _invalid_values(view, layer, parameter, values):
        yield Finding.at(rules.INVALID_SCALE, tensor.name, invalid=problems, count=values.size)
        return
    if parameter == "input_scale" and values.min() < 0:
        yield Finding.at(rules.NEGATIVE_INPUT_SCALE, tensor.name)
    findings: list[Finding] = []
    if parameter.endswith("global_scale"):
        findings += _global_scale_size(tensor, parameter, float(values.max()))
    elif parameter == "input_scale":
        findings += _input_scale_size(tensor, float(np.abs(values).max()))
    has_no_effect = is_empty if parameter.startswith("weight") else input_is_zero
    if findings and not has_no_effect(view, layer):
        yield from findings


def _invalid_values(
    view: CheckpointView, layer: StoredLayer, parameter: str, values: npt.NDArray[np.float64]
) -> list[str]:
    kinds = np.isnan(values), np.isinf(values), values == 0, values < 0
    counts = (int(np.count_nonzero(kind)) for kind in kinds)
    wrong = dict(zip(("NaN", "infinite", "zero", "negative"), counts, strict=True))
    if _may_be_negative(values, parameter, layer.group):
        wrong["negative"] = 0
    if wrong["zero"] and parameter == "weight_scale":
        empty = empty_parts(view, layer, layer.parameters[parameter])
        if empty is not None and empty[values == 0].all():
            wrong["zero"] = 0
    # ModelOpt stores the second scale of an all-zero weight as zero, and its reciprocal is
    # infinite.
    is_reciprocal = parameter == "weight_global_scale" and parameter in view.reciprocals
    if wrong["infinite"] and is_reciprocal and is_empty(view, layer):
        wrong["infinite"] = 0
    return [plural(count, f"{kind} value") for kind, count in wrong.items() if count]


def _may_be_negative(
    values: npt.NDArray[np.float64], parameter: str, group: ConfigGroup | None
) -> bool:
    """Return True if negative values of this scale are harmless or intended.

    The sign of an input scale cancels for floating-point weights. Weight scales of integers may be
    negative if both signs are frequent: vLLM multiplies by them unchanged.
    """
    if group is None or group.weights.is_float:
        return group is not None and parameter == "input_scale"
    rarer = min(int(np.count_nonzero(values < 0)), int(np.count_nonzero(values > 0)))
    return (
        parameter == "weight_scale"
        and values.size >= MANY_SCALES
        and rarer >= MIN_SIGN_SHARE * values.size
    )


def _unusual_layers(sizes: Mapping[str, ScaleSizes]) -> Iterator[Finding]:
    """Warn of a layer with far larger or smaller weights than all layers of its kind.

    Without digests and a source, this is the only trace of scales that are all wrong by a factor.
    It is no proof, because layers differ in trained models, too.
    """
    kinds: dict[tuple[str, str], list[ScaleSizes]] = {}
    for name, each in sizes.items():
        kinds.setdefault((NUMBER.sub("*", name), each.precision), []).append(each)
    for (kind, _), members in kinds.items():
        if len(members) < MIN_LAYERS:
            continue
        first, *_, last = ordered = sorted(members, key=lambda each: each.typical)
        for layer, nearest in ((last, ordered[-2]), (first, ordered[1])):
            smaller, larger = sorted((layer.typical, nearest.typical))
            if larger >= MAX_FACTOR * smaller:
                yield Finding.at(
                    rules.UNUSUAL_WEIGHTS,
                    layer.scale.name,
                    typical=layer.typical,
                    nearest=nearest.typical,
                    others=len(members) - 1,
                    kind=kind,
                )


def _implausible_scales(
    view: CheckpointView,
    layers: Sequence[StoredLayer],
    group: ConfigGroup,
    typical: dict[str, ScaleSizes],
) -> Iterator[Finding]:
    """Report scales that imply weights larger or smaller than in any trained model.

    The sizes of plausible scales are added to `typical`, by the name of the layer.
    """
    sizes = {
        layer.name: size
        for layer in layers
        if (size := _scale_sizes(view, group, layer)) is not None
    }
    if next(_wrong_sizes(group, [*sizes.values()]), None) is None:
        typical |= sizes
        return
    # Reading all codes takes time: it is only done if a scale looks wrong.
    known = (layer for layer in layers if layer.name in sizes)
    without_zeros = (_scale_sizes(view, group, layer, filled_only=True) for layer in known)
    yield from _wrong_sizes(group, [size for size in without_zeros if size is not None])


def _scale_sizes(
    view: CheckpointView, group: ConfigGroup, layer: StoredLayer, *, filled_only: bool = False
) -> ScaleSizes | None:
    """Return the sizes of a layer's scales.

    With `filled_only`, a scale is skipped if all its codes are zero. Returns None if the layer has
    no scales, if their dtype is wrong, or if all of them are skipped.
    """
    scale = layer.filled("weight_scale")
    if scale is None or scale.dtype not in BITS:
        return None
    if scale.dtype != "U8" and group.storage.exponent_scales:
        return None
    empty = empty_parts(view, layer, scale) if filled_only else None
    if empty is None:
        (least, most), middle, count = (
            scale_range(view.reader, scale),
            median_magnitude(view.reader, scale),
            math.prod(scale.shape),
        )
    else:
        magnitudes = np.abs(scale_values(view.reader, scale)[~empty])
        if not magnitudes.size:
            return None
        least, most, middle = (float(each(magnitudes)) for each in (np.min, np.max, np.median))
        count = magnitudes.size
    weight = layer.filled("weight")
    return ScaleSizes(
        scale=scale,
        precision=f"{group.weights.num_bits} {scale.dtype} {weight.dtype if weight else ''}",
        count=count,
        least=least,
        most=most,
        typical=_typical(view, group, layer, middle),
    )


def _wrong_sizes(group: ConfigGroup, sizes: Sequence[ScaleSizes]) -> Iterator[Finding]:
    found: dict[str, Finding] = {}
    for each in sizes:
        name = each.scale.name
        are_equal = each.count >= MANY_SCALES and each.least == each.most
        if are_equal and not group.storage.exponent_scales:
            found[name] = Finding.at(rules.EQUAL_SCALES, name, count=each.count, value=each.least)
        elif not MIN_TYPICAL <= each.typical <= MAX_TYPICAL:
            found[name] = Finding.at(rules.WEIGHT_SIZE, name, typical=each.typical)
    if group.storage is NVFP4 and sizes:
        for finding in _small_block_scales(sizes):
            found.setdefault(finding.where, finding)
    yield from found.values()


def _small_block_scales(sizes: Sequence[ScaleSizes]) -> Iterator[Finding]:
    """Report NVFP4 scales that are too small. The largest scale should be about 448."""
    largest = max(each.most for each in sizes)
    if largest < MIN_LARGEST_BLOCK:
        yield Finding.at(rules.SMALL_BLOCK_SCALES, sizes[0].scale.name, largest=largest)
        return
    for each in sizes:
        if each.most < 1:
            yield Finding.at(
                rules.SMALLER_THAN_FUSED, each.scale.name, largest=each.most, fused=largest
            )


def _global_scale_size(tensor: TensorInfo, parameter: str, value: float) -> Iterator[Finding]:
    """Yield findings on the size of a global scale of weights or inputs, which is 448*6/absmax."""
    of_weight = parameter.startswith("weight")
    least = MIN_WEIGHT_GLOBAL_SCALE if of_weight else MIN_INPUT_GLOBAL_SCALE
    if value < least:
        yield Finding.at(rules.INVERTED_GLOBAL_SCALE, tensor.name, value=value, least=least)
    elif value == PLACEHOLDER:
        yield Finding.at(rules.UNCALIBRATED, tensor.name)
    elif not of_weight and value > GLOBAL_SCALE_NUMERATOR / MIN_INPUT:
        largest = GLOBAL_SCALE_NUMERATOR / value
        yield Finding.at(rules.INPUT_SIZE, tensor.name, value=value, largest=largest)


def _input_scale_size(tensor: TensorInfo, value: float) -> Iterator[Finding]:
    """Yield findings on the size of a static input scale of e4m3 or of integers.

    For simplicity, the bounds use the largest value of e4m3 (448) for integers, too, although
    their largest code is 127.
    """
    largest = value * E4M3_MAX
    if not MIN_INPUT <= largest <= MAX_INPUT:
        yield Finding.at(rules.INPUT_SIZE, tensor.name, value=value, largest=largest)
    elif value == PLACEHOLDER:
        yield Finding.at(rules.UNCALIBRATED, tensor.name)


def _typical(view: CheckpointView, group: ConfigGroup, layer: StoredLayer, scale: float) -> float:
    """Return the size of a layer's typical weight.

    `scale` is multiplied by the mean magnitude of the codes for e4m3, and by a quarter of the
    largest code for other formats.
    """
    args = group.weights
    if global_scale := layer.filled("weight_global_scale"):
        scale /= float(scale_values(view.reader, global_scale).max())
    weight = layer.filled("weight")
    if not args.is_float or weight is None or weight.dtype != "F8_E4M3":
        return scale * (E2M1_MAX if args.is_float else 2.0 ** (args.num_bits - 1)) / 4
    codes = np.frombuffer(view.reader.raw(weight), np.uint8)[: 1 << 16]
    magnitudes = np.abs(_E4M3[codes[codes & 0x7F != E4M3_NAN]])
    return scale * float(magnitudes.mean()) if magnitudes.size else scale


def code_range_findings(view: CheckpointView) -> Iterator[Finding]:
    """Report a layer that rarely uses the largest code, and layers with lost weights.

    A producer computes the scale of a row or group from its largest value, so that this value gets
    the largest code. If a weight is transposed, or has the scales of another layer, the largest
    code is missing in many rows or groups. Observers and GPTQ may also avoid the largest code. A
    layer is therefore only reported if it is the only such layer.

    Weights are lost if all codes of a row or group are zero although its scale has a usual size.
    """
    full: dict[str, float] = {}
    findings = []
    for layer, group in _quantized(view):
        module, stored = layer.name, dict[str, Rows]()
        share = _full_range_share(view, group, layer, stored)
        if share is not None:
            full[module] = share
        empty = _lost_share(view, group, layer, stored)
        if empty is not None and empty > MAX_LOST:
            # If all weights of a scale are zero, producers store the smallest scale or a
            # placeholder.
            findings.append(Finding.at(rules.LOST_WEIGHTS, module, share=empty))
    few = [module for module, share in full.items() if share < MIN_FULL]
    if len(few) == 1 and full[few[0]] < MAX_FULL and len(full) > MIN_OTHER_LAYERS:
        yield Finding.at(rules.NO_LARGEST_CODES, few[0], share=1 - full[few[0]])
    yield from findings


def _quantized(view: CheckpointView) -> Iterator[tuple[StoredLayer, ConfigGroup]]:
    for fused in read_ahead(view.model.fused_layers, partial(_prefetch_rows, view)):
        for layer in view.layers.members(fused):
            if layer.group is not None:
                yield layer, layer.group
                view.reader.release(layer.parameters.values())


def _prefetch_rows(view: CheckpointView, fused: FusedLayer) -> None:
    if view.lookup.group_of(fused) is None:
        return
    for module in fused.members:
        parameters = view.model.modules[module]
        for tensor in (parameters[name] for name in WEIGHTS if name in parameters):
            view.reader.prefetch_some_rows(tensor, _step(view, tensor))


def _lost_share(
    view: CheckpointView, group: ConfigGroup, layer: StoredLayer, stored: dict[str, Rows]
) -> float | None:
    """Return the share of scales that have a usual size although all their codes are zero.

    Returns None if the share cannot be computed for this layout.
    """
    weight, scale = layer.weight, layer.parameters.get("weight_scale")
    if weight is None or scale is None or len(weight.shape) != 2 or len(scale.shape) != 2:
        return None
    if group.weights.block or not weight.num_bytes:
        return None
    codes = _rows(view, weight, stored)
    if scale.shape[0] != weight.shape[0] or not scale.shape[1] or codes.shape[1] % scale.shape[1]:
        return None
    if weight.dtype in ("U8", "F8_E4M3"):
        codes = codes & np.uint8(0x77 if weight.dtype == "U8" else 0x7F)
    parts = codes.reshape(codes.shape[0], scale.shape[1], -1)
    empty = np.any(
        [(parts == zero).all(axis=2) for zero in {0, _zero_codes(group, weight)}], axis=0
    )
    if not empty.any():
        return 0.0
    with np.errstate(invalid="ignore"):
        values = to_numpy(_rows(view, scale, stored).tobytes(), scale.dtype)
        scales = np.asarray(values, np.float64).reshape(-1, scale.shape[1])
    usual = (scales > np.median(scales) * MIN_USUAL) & ~np.isin(scales, PLACEHOLDERS)
    of_empty = scales[empty]
    # A producer stores the same scale for all empty parts. Lost weights would have different
    # scales.
    if of_empty.size > 1 and of_empty.min() == of_empty.max():
        return 0.0
    return float((empty & usual).mean())


def _zero_codes(group: ConfigGroup, weight: TensorInfo) -> int:
    """Return the byte that contains only codes of the value zero.

    Packed integers store zero as the middle code. A byte 0 in them is lost data: a file that was
    not completely written contains zeros.
    """
    bits = group.weights.num_bits
    if weight.dtype != "I32" or bits not in (4, 8):
        return 0
    return 0x88 if bits == 4 else 0x80


def _full_range_share(
    view: CheckpointView, group: ConfigGroup, layer: StoredLayer, stored: dict[str, Rows]
) -> float | None:
    storage, expected = group.storage, group.expected(layer.parameters)
    weight = layer.filled(storage.weight)
    if weight is None or expected is None or not group.weights.symmetric:
        return None
    if weight.dtype not in expected[storage.weight].dtypes:
        return None
    found = storage.largest_codes(group, _rows(view, weight, stored))
    largest, end = found if found is not None else (np.zeros(0, np.uint8), 0)
    largest = largest[largest > 0]  # zeros belong to rows or groups that are all zero
    return float((largest >= end).mean()) if largest.size else None


def _rows(view: CheckpointView, tensor: TensorInfo, stored: dict[str, Rows]) -> Rows:
    """Return some rows of a tensor as bytes, cached in `stored`.

    The same rows are returned for all tensors with the same number of rows.
    """
    if tensor.name not in stored:
        stored[tensor.name] = view.reader.some_rows(tensor, _step(view, tensor))
    return stored[tensor.name]


def _step(view: CheckpointView, tensor: TensorInfo) -> int:
    rows = min(max(ROWS_OF_ALL // len(view.model.fused_layers), MIN_ROWS), MAX_ROWS)
    return max(tensor.shape[0] // rows, 1)


def read_ahead(
    layers: Sequence[FusedLayer], begin: Callable[[FusedLayer], None]
) -> Iterator[FusedLayer]:
    """Yield the layers, and start reading later layers in time.

    `begin` is called for the layer that is READ_AHEAD_LAYERS positions after the yielded layer.
    """
    for number, layer in enumerate(layers):
        if number + READ_AHEAD_LAYERS < len(layers):
            begin(layers[number + READ_AHEAD_LAYERS])
        yield layer
