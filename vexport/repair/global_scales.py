"""Global scales: 448*6/absmax, not its reciprocal, and one for all layers that vLLM runs as one."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from compressed_tensors.compressors import BaseCompressor

from vexport.checks.fusion import INPUT_GLOBAL_SCALE as INPUT
from vexport.checks.fusion import WEIGHT_GLOBAL_SCALE as WEIGHT
from vexport.checks.values import LEAST_INPUT_GLOBAL_SCALE, LEAST_WEIGHT_GLOBAL_SCALE
from vexport.checks.vllm.groups import FusedLinear, StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.dequantize import read_parameters, vllm_storage, weight_of
from vexport.fidelity.source import ComparedSource
from vexport.formats.dequantize import ct_scheme
from vexport.numerics import E4M3_MAX
from vexport.numerics.metrics import quantization_error
from vexport.observers import MemorylessMinMaxObserver
from vexport.observers.qparams import scale_and_zero_point
from vexport.records import Repair, TensorInfo, TensorSpec
from vexport.repair.write import LOSSLESS, Changes, Edit

NAME = "global scales"
OTHER = "{:.9g}, not that of the layers it runs with"
LEAST = {WEIGHT: LEAST_WEIGHT_GLOBAL_SCALE, INPUT: LEAST_INPUT_GLOBAL_SCALE}
# The smallest positive e4m3 number: a block scale of a block that is not all zero never becomes zero.
E4M3_SMALLEST = 2.0**-9


def reciprocals(view: CheckpointView, source: ComparedSource | None) -> Changes:
    """Turn over the global scales that are absmax/(448*6): the values vLLM was meant to see."""
    changes = Changes()
    for layer in view.layers.values():
        for parameter in (WEIGHT, INPUT):
            value = view.single_value(layer.parameters.get(parameter))
            if value is not None and 0 < value < LEAST[parameter]:
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
            got, now = OTHER.format(value), f"{shared:.9g}"
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
    """Another value of a tensor of one number."""
    spec = TensorSpec(name=tensor.name, dtype="F32", shape=tensor.shape)
    make = partial(torch.full, tensor.shape, value, dtype=torch.float32)
    edit = Edit(tensors={NAME: spec}, near=tensor.name, make=lambda: {NAME: make()})
    repair = Repair(family=NAME, where=tensor.name, got=got, now=now, cost=cost)
    return Changes(edits=(edit,), repairs=(repair,))


def _weight(
    view: CheckpointView, source: ComparedSource | None, layer: StoredLayer, value: float, shared: float
) -> Changes:
    """The layer with the shared global scale, by the way that keeps more of the source where there is one."""
    make = partial(_rescaled, view, layer, shared)
    how, cost = "block scales rescaled", "the block scales to e4m3"
    changed: tuple[str, ...] = ("weight_scale", WEIGHT)
    exact = source.weight(layer.name) if source else None
    if source is not None and exact is not None and layer.group is not None:
        again, stored = partial(_requantized, layer, source, shared), read_parameters(view, layer.parameters)
        ways = (weight_of(layer.group, {**stored, **way()}) for way in (again, make))
        new, old = (quantization_error(exact, weight).error for weight in ways)
        if new < old:
            make, how, cost = again, "quantized again from the source", "a new quantization"
            changed = ("weight_packed", *changed)
    tensors = {parameter: layer.parameters[parameter] for parameter in changed}
    repair = Repair(
        family=NAME,
        where=tensors[WEIGHT].name,
        got=OTHER.format(value),
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


def _requantized(layer: StoredLayer, source: ComparedSource, shared: float) -> Mapping[str, torch.Tensor]:
    """A layer quantized again from its weight in the source, by min-max ranges."""
    weight, group = source.weight(layer.name), layer.group
    assert weight is not None
    assert group is not None
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
