"""Repair NVFP4's global scales: reciprocals, and fused layers with different scales.

vLLM keeps a single global scale for each fused layer. If the stored scales of its layers differ,
there are two explanations. The producer may have computed a separate global scale for each layer:
the block scales of a layer are then relative to this layer's scale, and the stored weights are
right. Or a stored global scale is wrong, and the layer's block scales are relative to another
number. The source decides between the two. Without a source, scales are only repaired if the
checkpoint shows that the producer computed separate scales (`_kinds_with_separate_scales`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from compressed_tensors.compressors import BaseCompressor

from vexport.architectures import with_stars
from vexport.architectures.fusion import FusedLayer
from vexport.checks.fusion import INPUT_GLOBAL_SCALE as INPUT
from vexport.checks.fusion import WEIGHT_GLOBAL_SCALE as WEIGHT
from vexport.checks.fusion import listed_values
from vexport.checks.numbers import single_value
from vexport.checks.values import MIN_INPUT_GLOBAL_SCALE, MIN_WEIGHT_GLOBAL_SCALE
from vexport.checks.vllm.groups import ConfigGroup, StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.dequantize import read_parameters, vllm_storage, weight_of
from vexport.fidelity.source import ComparedSource, SourceTensors
from vexport.fidelity.weights import REFITTED_DB, nearest_weight
from vexport.formats.dequantize import ct_scheme
from vexport.numerics import E4M3_MAX
from vexport.numerics.metrics import quantization_error
from vexport.observers.minmax import MemorylessMinMax
from vexport.observers.qparams import scale_and_zero_point
from vexport.records import Finding, Repair, TensorInfo, TensorSpec
from vexport.repair.write import LOSSLESS, Changes, Edit
from vexport.rules import fusion as rules

FAMILY = "global scales"
OTHER_SCALE = "{:.9g}, which the fused layers do not share"
MIN_GLOBAL_SCALES = {WEIGHT: MIN_WEIGHT_GLOBAL_SCALE, INPUT: MIN_INPUT_GLOBAL_SCALE}
# Smallest positive e4m3 value. The scale of a block that is not all zero never becomes zero.
E4M3_SMALLEST = 2.0**-9
# Scales with a smaller relative difference count as equal. float32 rounds by 6e-8 at most, and the
# reciprocal of a reciprocal by twice as much.
SAME_SCALE_TOLERANCE = 1e-6
# If a layer's block scales are relative to its global scale, the largest block scale is 448, the
# largest e4m3 value, or 416, the value below it.
LARGEST_BLOCK = 416.0
# A stored weight counts as the source's weight under two conditions. Its scale differs by at most
# MAX_GAIN_ERROR, and the squared cosine of the two weights is at least MIN_SQUARED_COSINE.
MAX_GAIN_ERROR, MIN_SQUARED_COSINE = 0.2, 0.5
ASSUMED_RECIPROCAL = "the stored number is the reciprocal of the layer's global scale"
ASSUMED_SEPARATE = (
    "the blocks of each layer were scaled with the global scale stored for this layer"
)
ASSUMED_MAJORITY = (
    "the scale of most of these layers is right (a source cannot confirm input scales)"
)
ASSUMED_WIDEST = (
    "the smallest scale, which has the widest range, is right (a source cannot confirm input "
    "scales)"
)
# Global scales by the names of their layers.
Scales = Mapping[str, float]


def reciprocals(view: CheckpointView, source: ComparedSource | None) -> Changes:
    """Invert global scales stored as absmax/(448*6): vLLM expects the reciprocal.

    With a source, the scale of a weight is inverted only if the weight then equals the source's
    weight.
    """
    origins = _origins(view, source)
    changes = Changes()
    for layer in view.layers.by_name.values():
        for parameter in (WEIGHT, INPUT):
            value = single_value(view.reader, layer.parameters.get(parameter))
            if (
                value is None
                or not torch.finfo(torch.float32).tiny <= value < MIN_GLOBAL_SCALES[parameter]
            ):
                continue
            inverse = _snap_to_members(view, layer, parameter, 1 / value)
            if parameter == INPUT:
                changes += _inverted(
                    layer, parameter, value, inverse, assumption=ASSUMED_RECIPROCAL
                )
                continue
            exact = _weight_in_source(origins, layer)
            if exact is None:
                changes += _inverted(
                    layer, parameter, value, inverse, assumption=ASSUMED_RECIPROCAL
                )
            elif _scale_matching_source(view, layer, (inverse,), exact) is not None:
                changes += _inverted(layer, parameter, value, inverse, assumption=None)
    return changes


def _inverted(
    layer: StoredLayer, parameter: str, value: float, inverse: float, *, assumption: str | None
) -> Changes:
    repair = Repair(
        family=FAMILY,
        where=layer.parameters[parameter].name,
        got=f"{value:.9g}, the reciprocal of a global scale",
        now=f"{inverse:.9g}",
        cost=LOSSLESS,
        layer=layer.name if parameter == WEIGHT and assumption is None else None,
        assumption=assumption,
    )
    return _scalar(layer.parameters[parameter], inverse, repair)


def _snap_to_members(
    view: CheckpointView, layer: StoredLayer, parameter: str, inverse: float
) -> float:
    """Return another member's scale if it equals `inverse` up to its last bits, else `inverse`."""
    for name in layer.fused.members:
        other = single_value(view.reader, view.model.modules[name].get(parameter))
        if other is not None and abs(other / inverse - 1) < SAME_SCALE_TOLERANCE:
            return other
    return inverse


def unequal_weights(view: CheckpointView, source: ComparedSource | None) -> Changes:
    """Give the weights of each fused layer a common global scale: the smallest of their scales.

    A layer's block scales are relative to its actual global scale. With a source, this is the
    stored scale with which the layer's weight equals the source's weight. Without a source, it is
    the scale stored for the layer if the checkpoint shows that its producer computed separate
    scales. Otherwise the repair is refused.

    Block scales are converted to the common global scale and rounded to e4m3 again. With a source,
    the layer is quantized again from the source if the result is closer to the source.
    """
    origins = _origins(view, source)
    unshared = _kinds_with_separate_scales(view)
    changes = Changes()
    for fused in view.model.fused_layers:
        values = _scales(view, fused, WEIGHT)
        if len(set(values.values())) < 2:
            continue
        if max(values.values()) / min(values.values()) - 1 < SAME_SCALE_TOLERANCE:
            changes += _same_number(view, values)
            continue
        exact = {name: _weight_in_source(origins, view.layers.by_name[name]) for name in values}
        known = {name: weight for name, weight in exact.items() if weight is not None}
        if len(known) == len(values):
            changes += _by_source(view, fused, values, known)
        elif with_stars(fused.name) in unshared:
            changes += _by_own_scales(view, values)
        else:
            changes += Changes(
                refusals=(_ambiguous_scales(fused, values, has_source=source is not None),)
            )
    return changes


def unequal_inputs(view: CheckpointView, source: ComparedSource | None) -> Changes:
    """Give the inputs of each fused layer the same global scale.

    All members read the same input, so different scales are a fault. The scale of most members is
    taken as right. Without a majority the smallest scale is used, because it does not clip
    anything.
    """
    changes = Changes()
    for fused in view.model.fused_layers:
        values = _scales(view, fused, INPUT)
        if len(set(values.values())) < 2:
            continue
        most, count = Counter(values.values()).most_common(1)[0]
        has_majority = 2 * count > len(values)
        shared = most if has_majority else min(values.values())
        for name, value in values.items():
            if value == shared:
                continue
            tensor = view.layers.by_name[name].parameters[INPUT]
            repair = Repair(
                family=FAMILY,
                where=tensor.name,
                got=OTHER_SCALE.format(value),
                now=f"{shared:.9g}",
                cost=f"{LOSSLESS} for weights; the range of this layer's inputs becomes "
                f"{value / shared:.4g} times as wide",
                assumption=ASSUMED_MAJORITY if has_majority else ASSUMED_WIDEST,
            )
            changes += _scalar(tensor, shared, repair)
    return changes


def _origins(view: CheckpointView, source: ComparedSource | None) -> SourceTensors | None:
    return SourceTensors(view, source.index, source.reader) if source is not None else None


def _weight_in_source(origins: SourceTensors | None, layer: StoredLayer) -> torch.Tensor | None:
    pieces = origins.pieces(layer) if origins is not None else ()
    if not pieces or layer.group is None or layer.group.refusal is not None:
        return None
    weight = pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces))
    return weight if tuple(weight.shape) == layer.group.shape(layer.parameters) else None


def _scales(view: CheckpointView, fused: FusedLayer, parameter: str) -> dict[str, float]:
    stored = {
        name: single_value(view.reader, view.model.modules[name].get(parameter))
        for name in fused.members
    }
    return {
        name: value for name, value in stored.items() if value is not None and 0 < value < math.inf
    }


def _same_number(view: CheckpointView, values: Scales) -> Changes:
    shared = Counter(values.values()).most_common(1)[0][0]
    changes = Changes()
    for name, value in values.items():
        if value != shared:
            tensor = view.layers.by_name[name].parameters[WEIGHT]
            repair = Repair(
                family=FAMILY,
                where=tensor.name,
                got=f"{value:.9g}, which differs from the other layers only in the last digits",
                now=f"{shared:.9g}",
                cost=LOSSLESS,
            )
            changes += _scalar(tensor, shared, repair)
    return changes


def _kinds_with_separate_scales(view: CheckpointView) -> frozenset[str]:
    """Return the kinds of fused layers for which the producer did not share global scales.

    A kind is the name of a fused layer with stars instead of numbers. Three conditions must hold
    for all fused layers of a kind: the scales of their members differ, the ratios of these scales
    are not the same in all of them, and every member has a block scale of at least LARGEST_BLOCK. A
    single wrong scale does not meet these conditions.
    """
    kinds: dict[str, list[Scales]] = {}
    for fused in view.model.fused_layers:
        values = _scales(view, fused, WEIGHT)
        if len(values) > 1:
            kinds.setdefault(with_stars(fused.name), []).append(values)
    return frozenset(kind for kind, groups in kinds.items() if _are_separate(view, groups))


def _are_separate(view: CheckpointView, groups: Sequence[Scales]) -> bool:
    if any(len(set(values.values())) < len(values) for values in groups):
        return False
    proportions = {
        tuple(f"{value / min(values.values()):.4g}" for value in values.values())
        for values in groups
    }
    if len(proportions) < 2:
        return False
    return all(_largest_block(view, name) >= LARGEST_BLOCK for values in groups for name in values)


def _largest_block(view: CheckpointView, name: str) -> float:
    tensor = view.layers.by_name[name].parameters.get("weight_scale")
    if tensor is None or not tensor.num_bytes:
        return 0.0
    scales = read_parameters(view, {"weight_scale": tensor})["weight_scale"]
    largest = float(scales.to(torch.float32).max())
    view.reader.release((tensor,))
    return largest


def _ambiguous_scales(fused: FusedLayer, values: Scales, *, has_source: bool) -> Finding:
    rule = rules.NO_SOURCE_OF_LAYERS if has_source else rules.AMBIGUOUS_SCALES
    return Finding.at(rule, _place(fused), values=listed_values(values))


def _place(fused: FusedLayer) -> str:
    """Return the place of an error. The check `fusion` reports these scales at the same place."""
    return f"{fused.name}: {WEIGHT}"


def _by_own_scales(view: CheckpointView, values: Scales) -> Changes:
    shared = min(values.values())
    changes = Changes()
    for name, value in values.items():
        if value != shared:
            changes += _to_shared(view, view.layers.by_name[name], value, value, shared, None)
    return changes


def _by_source(
    view: CheckpointView, fused: FusedLayer, values: Scales, exact: Mapping[str, torch.Tensor]
) -> Changes:
    candidates = tuple(dict.fromkeys(values.values()))
    actual: dict[str, float] = {}
    for name in values:
        scale = _scale_matching_source(view, view.layers.by_name[name], candidates, exact[name])
        if scale is None:
            refusal = Finding.at(
                rules.NO_MATCHING_SCALE,
                _place(fused),
                values=listed_values(values),
                layer=name.rpartition(".")[2],
            )
            return Changes(refusals=(refusal,))
        actual[name] = scale
    shared = min(actual.values())
    changes = Changes()
    for name, value in values.items():
        if value != shared or actual[name] != shared:
            layer = view.layers.by_name[name]
            changes += _to_shared(view, layer, value, actual[name], shared, exact[name])
    return changes


def _scale_matching_source(
    view: CheckpointView, layer: StoredLayer, candidates: Sequence[float], exact: torch.Tensor
) -> float | None:
    stored = _with_scale(view, layer, candidates[0]).to(torch.float64).reshape(-1)
    source = exact.to(torch.float64).reshape(-1)
    power, source_power, product = (
        float(one @ other) for one, other in ((stored, stored), (source, source), (stored, source))
    )
    if not power or not source_power or not product**2 >= MIN_SQUARED_COSINE * power * source_power:
        return None
    # A global scale is a divisor: with another scale, the weight is `factor` times as large.
    factors = {scale: candidates[0] / scale for scale in candidates}
    errors = {
        scale: factor**2 * power - 2 * factor * product + source_power
        for scale, factor in factors.items()
    }
    nearest = min(errors, key=errors.__getitem__)
    gain = factors[nearest] * product / source_power
    return nearest if abs(gain - 1) <= MAX_GAIN_ERROR else None


def _with_scale(view: CheckpointView, layer: StoredLayer, scale: float) -> torch.Tensor:
    assert layer.group is not None
    stored = read_parameters(view, layer.parameters)
    stored[WEIGHT] = torch.full(stored[WEIGHT].shape, scale, dtype=stored[WEIGHT].dtype)
    weight = weight_of(layer.group, stored)
    view.reader.release(layer.parameters.values())
    return weight


@dataclass(frozen=True, slots=True, kw_only=True)
class _Storage:
    """New tensors of a layer with the shared global scale, and the cost of this repair."""

    how: str
    cost: str
    changed: tuple[str, ...]
    make: "partial[Mapping[str, torch.Tensor]]"


def _to_shared(
    view: CheckpointView,
    layer: StoredLayer,
    value: float,
    actual: float,
    shared: float,
    exact: torch.Tensor | None,
) -> Changes:
    """Store a layer with the shared global scale.

    `value` is the stored global scale. The block scales are relative to `actual`.
    """
    if actual == shared:
        tensor = layer.parameters[WEIGHT]
        repair = Repair(
            family=FAMILY,
            where=tensor.name,
            got=OTHER_SCALE.format(value),
            now=f"{shared:.9g}, with which the weight equals the source's weight",
            cost=LOSSLESS,
            layer=layer.name,
        )
        return _scalar(tensor, shared, repair)
    way = _Storage(
        how="block scales rescaled",
        cost="the rounding of the block scales to e4m3",
        changed=("weight_scale", WEIGHT),
        make=partial(_rescaled, view, layer, actual, shared),
    )
    if exact is not None:
        way = _closer_storage(view, layer, actual, shared, exact, way)
    tensors = {parameter: layer.parameters[parameter] for parameter in way.changed}
    repair = Repair(
        family=FAMILY,
        where=tensors[WEIGHT].name,
        got=OTHER_SCALE.format(value),
        now=f"{shared:.9g}, {way.how}",
        cost=way.cost,
        layer=layer.name,
        assumption=ASSUMED_SEPARATE if exact is None else None,
    )
    specs = {
        parameter: TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape)
        for parameter, tensor in tensors.items()
    }
    return Changes(
        edits=(Edit(tensors=specs, near=repair.where, make=way.make),), repairs=(repair,)
    )


def _closer_storage(
    view: CheckpointView,
    layer: StoredLayer,
    actual: float,
    shared: float,
    exact: torch.Tensor,
    rescaling: _Storage,
) -> _Storage:
    """Return a new quantization of the source's weight if it is closer than `rescaling`.

    If the stored weight is further from the source than a weight rounded to nearest, it may have
    been smoothed, or rounded with calibration data. It is then only rescaled, to keep this work.
    """
    assert layer.group is not None
    group = layer.group
    stored_snr = quantization_error(exact, _with_scale(view, layer, actual)).sqnr_db
    nearest_snr = quantization_error(exact, nearest_weight(group.weights, exact)).sqnr_db
    if nearest_snr - stored_snr > REFITTED_DB:
        return rescaling
    again = _Storage(
        how="quantized again from the source",
        cost="the rounding of a new quantization",
        changed=("weight_packed", "weight_scale", WEIGHT),
        make=partial(_requantized, group, exact, shared),
    )
    stored = read_parameters(view, layer.parameters)
    errors = [
        quantization_error(exact, weight_of(group, {**stored, **way.make()})).error
        for way in (again, rescaling)
    ]
    return again if errors[0] < errors[1] else rescaling


def _scalar(tensor: TensorInfo, value: float, repair: Repair) -> Changes:
    spec = TensorSpec(name=tensor.name, dtype="F32", shape=tensor.shape)
    edit = Edit(
        tensors={FAMILY: spec},
        near=tensor.name,
        make=lambda: {FAMILY: torch.full(tensor.shape, value)},
    )
    return Changes(edits=(edit,), repairs=(repair,))


def _rescaled(
    view: CheckpointView, layer: StoredLayer, actual: float, shared: float
) -> Mapping[str, torch.Tensor]:
    stored = read_parameters(
        view, {parameter: layer.parameters[parameter] for parameter in ("weight_scale", WEIGHT)}
    )
    scale = stored["weight_scale"].to(torch.float64)
    rescaled = (scale * (shared / actual)).clamp(max=E4M3_MAX)
    rescaled = torch.where(scale > 0, rescaled.clamp(min=E4M3_SMALLEST), scale)
    return {
        "weight_scale": rescaled.to(torch.float32).to(stored["weight_scale"].dtype),
        WEIGHT: torch.full(stored[WEIGHT].shape, shared, dtype=stored[WEIGHT].dtype),
    }


def _requantized(
    group: ConfigGroup, weight: torch.Tensor, shared: float
) -> Mapping[str, torch.Tensor]:
    observer = MemorylessMinMax("weight", replace(group.weights, observer_kwargs={}))
    observer.observe(weight)
    global_scale = torch.tensor([shared])
    scale, zero_point = scale_and_zero_point(*observer.range(), group.weights, global_scale)
    state = {
        "weight": weight.to(
            torch.float32
        ),  # compressed-tensors would divide in the dtype of the weight
        "weight_scale": scale,
        "weight_zero_point": zero_point.to(torch.int8),
        WEIGHT: global_scale,
    }
    compressor = BaseCompressor.get_value_from_registry(vllm_storage(group).name)
    compressed: Mapping[str, torch.Tensor] = compressor.compress(state, ct_scheme(group))
    return compressed
