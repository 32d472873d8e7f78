"""Global scales: 448*6/absmax, not its reciprocal, and one for all layers that vLLM runs as one."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from compressed_tensors.compressors import BaseCompressor

from vexport.checks.fusion import INPUT_GLOBAL_SCALE as INPUT
from vexport.checks.fusion import WEIGHT_GLOBAL_SCALE as WEIGHT
from vexport.checks.values import LEAST_INPUT_GLOBAL_SCALE, LEAST_WEIGHT_GLOBAL_SCALE
from vexport.checks.vllm.layers import FusedLinear, StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.dequantize import read_parameters, vllm_storage, weight_of
from vexport.fidelity.source import ComparedSource
from vexport.formats.dequantize import ct_scheme
from vexport.numerics.constants import E4M3_MAX
from vexport.numerics.metrics import quantization_error
from vexport.observers import MemorylessMinMaxObserver
from vexport.observers.qparams import scale_and_zero_point
from vexport.records import TensorInfo, TensorSpec
from vexport.repair.changes import LOSSLESS, Changes, Edit, Repair

NAME = "global scales"
LEAST = {WEIGHT: LEAST_WEIGHT_GLOBAL_SCALE, INPUT: LEAST_INPUT_GLOBAL_SCALE}
# The smallest positive e4m3 number: a block scale of a block that is not all zero never becomes zero.
E4M3_SMALLEST = 2.0**-9


def reciprocals(view: CheckpointView, source: ComparedSource | None) -> Changes:
    """Turn over the global scales that are absmax/(448*6): the values vLLM was meant to see."""
    edits, repairs = [], []
    for layer in view.layers.values():
        for parameter in (WEIGHT, INPUT):
            value = view.single_value(layer.parameters.get(parameter))
            if value is not None and 0 < value < LEAST[parameter]:
                tensor = layer.parameters[parameter]
                edits.append(_scalar(tensor, 1 / value))
                repairs.append(
                    Repair(
                        family=NAME,
                        where=tensor.name,
                        got=f"{value:.9g}, the reciprocal of a global scale",
                        now=f"{1 / value:.9g}",
                        cost=f"{LOSSLESS}: the values are those that the producer meant",
                    )
                )
    return Changes(edits=tuple(edits), repairs=tuple(repairs))


def unequal(view: CheckpointView, source: ComparedSource | None) -> Changes:
    """Give the layers that vLLM runs as one the same global scale.

    Weights: the smallest, that of the largest range. Block scales are rescaled and rounded to e4m3 again, or,
    where a source shows that this is better, the layer is quantized again. Inputs: the one that most of the
    layers have, since they read the same input and another is a fault; without a majority the smallest, which
    cuts off nothing. Only the global scale changes.
    """
    edits: list[Edit] = []
    repairs: list[Repair] = []
    for fused in view.fused_linears:
        for parameter in (WEIGHT, INPUT):
            for layer, value, shared in _differing(view, fused, parameter):
                make = _input if parameter == INPUT else partial(_weight, view, source)
                edit, repair = make(layer, value, shared)
                edits.append(edit)
                repairs.append(repair)
    return Changes(edits=tuple(edits), repairs=tuple(repairs))


def _differing(
    view: CheckpointView, fused: FusedLinear, parameter: str
) -> Iterator[tuple[StoredLayer, float, float]]:
    """(layer, its value, the shared one) of the layers whose value is not the one for all of `fused`."""
    layers = view.layers
    values = {
        name: view.single_value(parameters.get(parameter)) for name, parameters in fused.members.items()
    }
    usable = {name: value for name, value in values.items() if value is not None and 0 < value < math.inf}
    shared = _shared(list(usable.values()), parameter) if usable else 0.0
    for name, value in usable.items():
        if value != shared:
            yield layers[name], value, shared


def _shared(values: Sequence[float], parameter: str) -> float:
    most, count = Counter(values).most_common(1)[0]
    return most if parameter == INPUT and 2 * count > len(values) else min(values)


def _input(layer: StoredLayer, value: float, shared: float) -> tuple[Edit, Repair]:
    tensor = layer.parameters[INPUT]
    repair = Repair(
        family=NAME,
        where=tensor.name,
        got=f"{value:.9g}, not that of the layers it runs with",
        now=f"{shared:.9g}",
        cost=f"no weight; the range of its inputs is {value / shared:.4g} times as wide",
    )
    return _scalar(tensor, shared), repair


def _weight(
    view: CheckpointView, source: ComparedSource | None, layer: StoredLayer, value: float, shared: float
) -> tuple[Edit, Repair]:
    """The layer with the shared global scale, by the way that keeps more of the source where there is one."""
    rescale = partial(_rescaled, view, layer, shared)
    again = partial(requantized, layer, source, shared) if source else None
    better = again is not None and _is_better(view, layer, source, again, rescale)
    make = again if better and again is not None else rescale
    how = "quantized again from the source" if better else "block scales rescaled"
    repair = Repair(
        family=NAME,
        where=layer.parameters[WEIGHT].name,
        got=f"{value:.9g}, not that of the layers it runs with",
        now=f"{shared:.9g}, {how}",
        cost="the rounding of " + ("a new quantization" if better else "the block scales to e4m3"),
        layer=layer.name,
    )
    parameters = ("weight_packed", "weight_scale", WEIGHT) if better else ("weight_scale", WEIGHT)
    return _edit(layer, parameters, make), repair


def _edit(
    layer: StoredLayer, parameters: tuple[str, ...], make: Callable[[], Mapping[str, torch.Tensor]]
) -> Edit:
    named = tuple(layer.parameters[parameter] for parameter in parameters)
    specs = tuple(TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape) for tensor in named)

    def renamed() -> Mapping[str, torch.Tensor]:
        values = make()
        return {
            tensor.name: values[parameter].reshape(tensor.shape)
            for parameter, tensor in zip(parameters, named, strict=True)
        }

    return Edit(tensors=specs, near=named[0].name, make=renamed)


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


def _is_better(
    view: CheckpointView,
    layer: StoredLayer,
    source: ComparedSource | None,
    again: Callable[[], Mapping[str, torch.Tensor]],
    rescale: Callable[[], Mapping[str, torch.Tensor]],
) -> bool:
    """Return whether quantizing again is nearer to the source than rescaling."""
    exact = source.weight(layer.name) if source else None
    if exact is None or layer.group is None:
        return False
    stored = read_parameters(view, layer.parameters)
    ways = [weight_of(layer.group, {**stored, **way()}) for way in (again, rescale)]
    return quantization_error(exact, ways[0]).error < quantization_error(exact, ways[1]).error


def _scalar(tensor: TensorInfo, value: float) -> Edit:
    spec = TensorSpec(name=tensor.name, dtype="F32", shape=tensor.shape)
    return Edit(
        tensors=(spec,),
        near=tensor.name,
        make=lambda: {tensor.name: torch.full(tensor.shape, value, dtype=torch.float32)},
    )


def requantized(
    layer: StoredLayer, source: ComparedSource, global_scale: float | None
) -> Mapping[str, torch.Tensor]:
    """A layer quantized again from the source, by min-max ranges: its weight tensors by their name within it.

    ValueError where vLLM has no scheme for the layer's config group.
    """
    weight, group = source.weight(layer.name), layer.group
    assert weight is not None
    assert group is not None
    observer = MemorylessMinMaxObserver("weight", replace(group.weights, observer_kwargs={}))
    observer.forward(weight)
    qparams = observer.get_qparams()
    shared = qparams["global_scale"] if global_scale is None else torch.tensor([global_scale])
    scale, zero_point = qparams["scale"], qparams["zero_point"]
    if shared is not None:
        scale, zero_point = scale_and_zero_point(*observer.range(), group.weights, shared)
    storage = vllm_storage(group)
    if storage.parameters(group, (weight.shape[0], weight.shape[1]))["weight_scale"].in_model_dtype:
        scale = scale.to(weight.dtype)
    # In float32: compressed-tensors would divide in the dtype of the weight.
    state = {
        "weight": weight.to(torch.float32),
        "weight_scale": scale,
        "weight_zero_point": zero_point.to(torch.int8),
    }
    if shared is not None:
        state["weight_global_scale"] = shared
    compressor = BaseCompressor.get_value_from_registry(storage.name)
    compressed: Mapping[str, torch.Tensor] = compressor.compress(state, ct_scheme(group))
    return compressed
