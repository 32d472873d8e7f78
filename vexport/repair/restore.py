"""What only the source can give back: missing tensors, and weights whose scales are no numbers."""

import math
from collections.abc import Iterator
from functools import partial

from vexport.checkpoint.tensors import TORCH_DTYPES
from vexport.checks import completeness, values
from vexport.checks.tensors.plausible import LEAST_WEIGHT_GLOBAL_SCALE
from vexport.checks.vllm.layers import Layer, layers_of, single_value
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.source import Source
from vexport.repair.changes import LOSSLESS, Changes, Edit, Repair
from vexport.repair.requantize import requantized
from vexport.types import TensorSpec

NAME = "source"
WEIGHT_PARAMETERS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale")
GLOBAL = "weight_global_scale"
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def run(view: CheckpointView, source: Source | None) -> Changes:
    """Tensors from the source for what completeness and values find; nothing without a source."""
    if source is None:
        return Changes()
    broken = dict.fromkeys(finding.where for finding in (*completeness.run(view), *values.run(view)))
    layers = layers_of(view)
    edits: list[Edit] = []
    repairs: list[Repair] = []
    again: dict[str, str] = {}
    for name in broken:
        module, _, parameter = name.rpartition(".")
        layer = layers.get(module)
        if layer is not None and layer.is_quantized:
            if parameter in WEIGHT_PARAMETERS and not _is_reciprocal(view, layer, parameter):
                again.setdefault(module, name)
        elif name in source.index.tensors and name not in view.index.tensors:
            edit, repair = _copied(view, source, name)
            edits.append(edit)
            repairs.append(repair)
    for module, name in again.items():
        for edit, repair in _quantized_again(view, source, layers[module], name):
            edits.append(edit)
            repairs.append(repair)
    return Changes(edits=tuple(edits), repairs=tuple(repairs))


def _is_reciprocal(view: CheckpointView, layer: Layer, parameter: str) -> bool:
    """Whether a global scale is merely upside down, which needs no source."""
    value = single_value(view, layer.parameters.get(parameter)) if parameter == GLOBAL else None
    return value is not None and 0 < value < math.inf


def _copied(view: CheckpointView, source: Source, name: str) -> tuple[Edit, Repair]:
    stored = source.index.tensors[name]
    spec = TensorSpec(name=name, dtype=stored.dtype, shape=stored.shape)
    edit = Edit(tensors=(spec,), near=_neighbour(view, name), make=lambda: {name: source.tensor(name)})
    got = "no such tensor"
    repair = Repair(family=NAME, where=name, got=got, now="the tensor of the source", cost=LOSSLESS)
    return edit, repair


def _quantized_again(
    view: CheckpointView, source: Source, layer: Layer, name: str
) -> Iterator[tuple[Edit, Repair]]:
    """The layer's weight tensors, made from the source with the global scale of those it runs with."""
    if layer.group is None or layer.group.refusal is not None or source.weight(layer.name) is None:
        return
    make = partial(requantized, layer, source, _global_scale(view, source, layer))
    specs = {
        parameter: TensorSpec(
            name=f"{layer.name}.{parameter}", dtype=SAFETENSORS_DTYPES[value.dtype], shape=tuple(value.shape)
        )
        for parameter, value in make().items()
    }
    yield (
        Edit(
            tensors=tuple(specs.values()),
            near=next(iter(layer.parameters.values())).name,
            make=lambda: {specs[parameter].name: value for parameter, value in make().items()},
        ),
        Repair(
            family=NAME,
            where=layer.name,
            got=f"a {name.rpartition('.')[2]} that is missing or holds no usable numbers",
            now="quantized again from the source",
            cost="the rounding of a new quantization by min-max ranges",
            layer=layer.name,
        ),
    )


def _global_scale(view: CheckpointView, source: Source, layer: Layer) -> float | None:
    """The global scale that the layers it runs with share, unless its own range needs a smaller one."""
    own = requantized(layer, source, None).get(GLOBAL)
    if own is None:
        return None
    shared = {
        value
        for parameters in layer.fused.members.values()
        if (value := single_value(view, parameters.get(GLOBAL))) is not None
    }
    usable = {value for value in shared if LEAST_WEIGHT_GLOBAL_SCALE <= value < math.inf}
    return min(float(own), *usable) if len(usable) == 1 else float(own)


def _neighbour(view: CheckpointView, name: str) -> str:
    """A tensor of the nearest module that the checkpoint has."""
    prefix = name
    while prefix:
        prefix = prefix.rpartition(".")[0]
        near = [other for other in view.index.tensors if other.startswith(f"{prefix}.")]
        if near:
            return near[-1]
    return list(view.index.tensors)[-1]
