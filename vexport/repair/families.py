"""Every family of repairs, and what their changes cost: what needs torch."""

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from torch.nn import Linear

from vexport.checkpoint.index import QUANTIZATION_CONFIG
from vexport.checks import kv_cache as announced
from vexport.checks.config import FORMAT_NAMES
from vexport.checks.fusion import INPUT_GLOBAL_SCALE as INPUT
from vexport.checks.fusion import WEIGHT_GLOBAL_SCALE as WEIGHT
from vexport.checks.values import LEAST_INPUT_GLOBAL_SCALE, LEAST_WEIGHT_GLOBAL_SCALE
from vexport.checks.vllm.groups import ConfigGroup, FusedLinear, StoredLayer, fits
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.dequantize import dequantized, read_parameters, vllm_storage, weight_of
from vexport.fidelity.source import ComparedSource
from vexport.formats.arguments import Strategy, parse_args
from vexport.formats.config import K_SCALE, KV_CACHES, V_SCALE, kv_layout
from vexport.formats.dequantize import ct_scheme
from vexport.layers.linears import attention_layers
from vexport.numerics import E4M3_MAX
from vexport.numerics.metrics import quantization_error
from vexport.observers import MemorylessMinMaxObserver
from vexport.observers.qparams import scale_and_zero_point
from vexport.records import Json, KvCache, Repair, TensorInfo, TensorSpec, WeightChange
from vexport.repair import Family, config
from vexport.repair.write import LOSSLESS, Changes, Edit, inside

GROUP_SIZES = (16, 32, 64, 128, 256)
# strategy, group size, symmetric
CHOICES: tuple[tuple[Strategy, int | None, bool], ...] = (
    ("tensor", None, True),
    ("channel", None, True),
    ("channel", None, False),
    ("block", None, True),
    ("tensor_group", 16, True),
    *(("group", size, symmetric) for size in GROUP_SIZES for symmetric in (True, False)),
)


GLOBAL_SCALES = "global scales"
OTHER_SCALE = "{:.9g}, not that of the layers it runs with"
LEAST = {WEIGHT: LEAST_WEIGHT_GLOBAL_SCALE, INPUT: LEAST_INPUT_GLOBAL_SCALE}
# The smallest positive e4m3 number: a block scale of a block that is not all zero never becomes zero.
E4M3_SMALLEST = 2.0**-9


def arguments(view: CheckpointView, source: ComparedSource | None) -> Changes:
    """The config with arguments that fit, for groups of which no layer fits and one reading fits all."""
    changed: dict[str, Json] = copy.deepcopy(dict(view.index.config))
    repairs: list[Repair] = []
    for group in view.config_groups:
        layers = [
            each.parameters for each in view.layers.values() if each.is_quantized and each.group is group
        ]
        if layers and not any(fits(group, parameters) for parameters in layers):
            fitting = (each for each in _readings(group) if all(fits(each, tensors) for tensors in layers))
            readings = {repr(reading.weights): reading for reading in fitting}
            if len(readings) == 1:
                repairs += _corrected(changed, group, *readings.values())
    return Changes(config=changed, repairs=tuple(repairs)) if repairs else Changes()


def _readings(group: ConfigGroup) -> Iterator[ConfigGroup]:
    """The group as it is and with other arguments, in its own format or the one that they imply."""
    blocks = group.weights.block_structure
    readings = [group.weights]
    for strategy, size, symmetric in CHOICES:
        if strategy != "block" or blocks:
            other = replace(group.weights, strategy=strategy, group_size=size, symmetric=symmetric)
            readings.append(replace(other, block_structure=blocks if strategy == "block" else None))
    for weights in readings:
        reading = replace(group, weights=replace(weights, observer_kwargs={}))
        implied = _implied_format(reading)
        if implied is not None and group.format in FORMAT_NAMES:
            yield reading
        if implied is not None:
            yield replace(reading, format=implied)


def _implied_format(group: ConfigGroup) -> str | None:
    """The format that compressed-tensors would store; None where it refuses the arguments."""
    try:
        return str(infer_module_format(Linear, ct_scheme(group)).value)
    except (NotImplementedError, ValueError):
        return None


def _corrected(config: dict[str, Json], group: ConfigGroup, right: ConfigGroup) -> Iterator[Repair]:
    raw = inside(config, QUANTIZATION_CONFIG, "config_groups", group.name)
    weights, where = inside(raw, "weights"), f"config_groups.{group.name}"
    if right.format != group.format:
        raw["format"] = right.format
        yield _argument_repair(f"{where}.format", group.format, right.format)
    for key in ("strategy", "group_size", "symmetric"):
        old, new = getattr(group.weights, key), getattr(right.weights, key)
        if old != new:
            weights[key] = new
            yield _argument_repair(f"{where}.weights.{key}", str(old), str(new))


def _argument_repair(where: str, got: str, now: str) -> Repair:
    cost = f"{LOSSLESS}: the tensors allow no other reading"
    return Repair(
        family="arguments", where=f"config.json: quantization_config.{where}", got=got, now=now, cost=cost
    )


def kv_cache(view: CheckpointView, source: ComparedSource | None) -> Changes:
    """Scales of 1.0 for all attention layers; nothing where some have scales: 1.0 would not go with them."""
    scheme = parse_args((view.quantization or {}).get("kv_cache_scheme"))
    if isinstance(scheme, str) or scheme.dynamic:
        return Changes()
    kind: KvCache = "fp8_per_head" if scheme.strategy == KV_CACHES["fp8_per_head"].strategy else "fp8"
    linears = [member for fused in view.fused_linears for member in fused.by_name.members]
    layers = attention_layers(linears, view.names, kind)
    missing = {finding.where for finding in announced.run(view)} - view.index.tensors.keys()
    if not all(
        f"{layer.name}.{parameter}" in missing for layer in layers for parameter in (K_SCALE, V_SCALE)
    ):
        return Changes()
    edits = []
    for layer in layers:
        near = [name for name in view.index.tensors if name.startswith(f"{layer.name}.")][-1]
        for spec in kv_layout(layer):
            edits.append(Edit(tensors={K_SCALE: spec}, near=near, make=partial(_ones, spec.shape)))
    cost = (
        "unknown without a calibration: keys and values beyond 448 saturate, small ones lose bits; "
        "it is what vLLM would take silently"
    )
    got, now = "a static kv_cache_scheme and no k_scale or v_scale", "1.0 for keys and values"
    repairs = (Repair(family="KV cache", where=each.name, got=got, now=now, cost=cost) for each in layers)
    return Changes(edits=tuple(edits), repairs=tuple(repairs))


def _ones(shape: tuple[int, ...]) -> Mapping[str, torch.Tensor]:
    return {K_SCALE: torch.ones(shape, dtype=torch.float32)}


def reciprocals(view: CheckpointView, source: ComparedSource | None) -> Changes:
    """Invert global scales stored as absmax/(448*6): vLLM expects the reciprocal."""
    changes = Changes()
    for layer in view.layers.values():
        for parameter in (WEIGHT, INPUT):
            value = view.single_value(layer.parameters.get(parameter))
            if value is not None and torch.finfo(torch.float32).tiny <= value < LEAST[parameter]:
                got, now = f"{value:.9g}, the reciprocal of a global scale", f"{1 / value:.9g}"
                cost = f"{LOSSLESS}: the values are those that the producer meant"
                changes += _scalar(layer.parameters[parameter], 1 / value, got, now, cost)
    return changes


def unequal(view: CheckpointView, source: ComparedSource | None) -> Changes:
    """Give the layers that vLLM runs as one the same global scale.

    Weights: the smallest, that of the largest range. Block scales are rescaled and rounded to e4m3 again, or,
    where a source shows that this is better, the layer is quantized again. Inputs: the one that most of the
    layers have, since they read the same input and another is a fault; without a majority the smallest, which
    cuts off nothing. Only the global scale changes.
    """
    changes = Changes()
    for fused in view.fused_linears:
        for layer, value, shared in _differing(view, fused, WEIGHT):
            changes += _weight(view, source, layer, value, shared)
        for layer, value, shared in _differing(view, fused, INPUT):
            cost = f"no weight; the range of its inputs is {value / shared:.4g} times as wide"
            got, now = OTHER_SCALE.format(value), f"{shared:.9g}"
            changes += _scalar(layer.parameters[INPUT], shared, got, now, cost)
    return changes


def _differing(
    view: CheckpointView, fused: FusedLinear, parameter: str
) -> Iterator[tuple[StoredLayer, float, float]]:
    """(layer, its value, the shared one) of the layers whose value is not the one for all of `fused`."""
    stored = {name: view.single_value(each.get(parameter)) for name, each in fused.members.items()}
    values = {name: value for name, value in stored.items() if value is not None and 0 < value < math.inf}
    if not values:
        return
    most, count = Counter(values.values()).most_common(1)[0]
    shared = most if parameter == INPUT and 2 * count > len(values) else min(values.values())
    yield from ((view.layers[name], value, shared) for name, value in values.items() if value != shared)


def _scalar(tensor: TensorInfo, value: float, got: str, now: str, cost: str) -> Changes:
    """Replace the value of a scalar tensor."""
    spec = TensorSpec(name=tensor.name, dtype="F32", shape=tensor.shape)
    edit = Edit(
        tensors={GLOBAL_SCALES: spec},
        near=tensor.name,
        make=lambda: {GLOBAL_SCALES: torch.full(tensor.shape, value)},
    )
    repair = Repair(family=GLOBAL_SCALES, where=tensor.name, got=got, now=now, cost=cost)
    return Changes(edits=(edit,), repairs=(repair,))


def _weight(
    view: CheckpointView, source: ComparedSource | None, layer: StoredLayer, value: float, shared: float
) -> Changes:
    """The layer with the shared global scale, by the way that keeps more of the source where there is one."""
    make = partial(_rescaled, view, layer, shared)
    how, cost = "block scales rescaled", "the block scales to e4m3"
    changed: tuple[str, ...] = ("weight_scale", WEIGHT)
    exact = source.weight(layer.name) if source else None
    if exact is not None and layer.group is not None:
        again, stored = (
            partial(_requantized, layer.group, exact, shared),
            read_parameters(view, layer.parameters),
        )
        ways = (weight_of(layer.group, {**stored, **way()}) for way in (again, make))
        new, old = (quantization_error(exact, weight).error for weight in ways)
        if new < old:
            make, how, cost = again, "quantized again from the source", "a new quantization"
            changed = ("weight_packed", *changed)
    tensors = {parameter: layer.parameters[parameter] for parameter in changed}
    repair = Repair(
        family=GLOBAL_SCALES,
        where=tensors[WEIGHT].name,
        got=OTHER_SCALE.format(value),
        now=f"{shared:.9g}, {how}",
        cost=f"the rounding of {cost}",
        layer=layer.name,
    )
    specs = {
        parameter: TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape)
        for parameter, tensor in tensors.items()
    }
    return Changes(edits=(Edit(tensors=specs, near=repair.where, make=make),), repairs=(repair,))


def _rescaled(view: CheckpointView, layer: StoredLayer, shared: float) -> Mapping[str, torch.Tensor]:
    """Block scales relative to the shared global scale, and the global scale."""
    stored = read_parameters(
        view, {parameter: layer.parameters[parameter] for parameter in ("weight_scale", WEIGHT)}
    )
    global_scale, scale = stored[WEIGHT].to(torch.float64), stored["weight_scale"].to(torch.float64)
    rescaled = (scale * (shared / global_scale)).clamp(max=E4M3_MAX)
    rescaled = torch.where(scale > 0, rescaled.clamp(min=E4M3_SMALLEST), scale)
    return {
        "weight_scale": rescaled.to(torch.float32).to(stored["weight_scale"].dtype),
        WEIGHT: torch.full(stored[WEIGHT].shape, shared, dtype=stored[WEIGHT].dtype),
    }


def _requantized(group: ConfigGroup, weight: torch.Tensor, shared: float) -> Mapping[str, torch.Tensor]:
    """A layer quantized again from its weight in the source, by min-max ranges."""
    observer = MemorylessMinMaxObserver("weight", replace(group.weights, observer_kwargs={}))
    observer.forward(weight)
    global_scale = torch.tensor([shared])
    scale, zero_point = scale_and_zero_point(*observer.range(), group.weights, global_scale)
    state = {
        "weight": weight.to(torch.float32),  # compressed-tensors would divide in the dtype of the weight
        "weight_scale": scale,
        "weight_zero_point": zero_point.to(torch.int8),
        WEIGHT: global_scale,
    }
    compressor = BaseCompressor.get_value_from_registry(vllm_storage(group).name)
    compressed: Mapping[str, torch.Tensor] = compressor.compress(state, ct_scheme(group))
    return compressed


def weight_change(
    before: CheckpointView, after: CheckpointView, layer: str, source: ComparedSource | None
) -> WeightChange | None:
    """The distance that a layer's weight moved; None where it cannot be dequantized afterwards."""
    old, new = dequantized(before, layer), dequantized(after, layer)
    if new is None:
        return None
    exact = source.weight(layer) if source else None
    against = None
    if exact is not None and exact.shape == new.shape:
        against = (
            None if old is None else quantization_error(exact, old).sqnr_db,
            quantization_error(exact, new).sqnr_db,
        )
    moved = quantization_error(old, new) if old is not None and old.shape == new.shape else None
    return WeightChange(
        relative=moved.relative if moved else None,
        snr_db=moved.sqnr_db if moved else None,
        source_snr_db=against,
    )


# The order matters: each family sees the changes of those before it.
FAMILIES: Sequence[Family] = (
    config.keys,
    arguments,
    config.targets,
    reciprocals,
    unequal,
    kv_cache,
)
