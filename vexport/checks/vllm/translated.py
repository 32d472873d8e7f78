"""Checkpoints of other quantization methods, viewed as compressed-tensors checkpoints."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from vexport.architectures.stored import joined_name
from vexport.checkpoint.reader import Derived, DerivedReader
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.lookup import GroupLookup
from vexport.checks.vllm.quant_methods.base import MethodGroup
from vexport.checks.vllm.view import CheckpointView
from vexport.records import TensorInfo


def translate(view: CheckpointView) -> CheckpointView:
    """Return a view in which quantized layers have compressed-tensors' tensors with equal values.

    Layers with tensors of another dtype or shape are left out, because other checks report them.
    """
    stored_names: dict[str, str] = {}
    reciprocals: set[str] = set()
    groups: dict[str, ConfigGroup] = {}
    tensors = dict(view.index.tensors)
    derived: dict[str, Derived] = {}
    for fused in view.model.fused_layers:
        group = view.lookup.group_of(fused)
        if not isinstance(group, MethodGroup) or not view.layers.is_quantized(fused):
            continue
        # `own` is a parameter's name in compressed-tensors, `stored` its name in the files.
        names = {own: _stored_name(group, own) for own in group.stored_as.names}
        stored_names |= {
            f"{fused.name}: {own}": f"{fused.name}: {stored}" for own, stored in names.items()
        }
        for module in fused.members:
            parameters = view.model.modules[module]
            groups[module] = group.translated
            for tensor in parameters.values():
                del tensors[tensor.name]
            usable = _usable_tensors(group, parameters)
            if usable is None:
                continue
            reciprocals |= group.stored_as.reciprocals
            for own, stored in {**names, "bias": "bias"}.items():
                stored_names[f"{module}.{own}"] = joined_name(module, stored)
            for own, made in group.stored_as.translated(group, usable).items():
                name = f"{module}.{own}"
                if isinstance(made, Derived):
                    derived[name] = made
                tensors[name] = (
                    made.info(name) if isinstance(made, Derived) else replace(made, name=name)
                )
    for name, renamed in _cache_scales(view, tensors).items():
        tensors[renamed] = replace(tensors.pop(name), name=renamed)
        stored_names[renamed] = name
    index = replace(view.index, tensors=tensors)
    translated = CheckpointView(index, DerivedReader(view.reader, derived), view.target)
    translated.lookup = GroupLookup(translated.model, translated.quantization, groups)
    translated.stored_names, translated.reciprocals = stored_names, reciprocals
    return translated


def _cache_scales(view: CheckpointView, tensors: Iterable[str]) -> dict[str, str]:
    scales = view.quantization.method.cache_scales if view.quantization.method else {}
    return {
        name: f"{name.removesuffix(stored)}{stored.partition('.')[0]}.{own}"
        for own, stored in scales.items()
        for name in tensors
        if name.endswith(f".{stored}")
    }


def _stored_name(group: MethodGroup, own: str) -> str:
    """Return the name under which the method stores the parameter `own`, for messages.

    If the method stores the reciprocal, the name is followed by a note.
    """
    is_reciprocal = own in group.stored_as.reciprocals
    note = " (the numbers are reciprocals of the stored values)" if is_reciprocal else ""
    return f"{group.stored_as.names[own]}{note}"


def _usable_tensors(
    group: MethodGroup, parameters: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo] | None:
    """Return the tensors of a layer that its scheme needs, and its bias.

    Returns None if a tensor is missing, or if its dtype or shape is wrong.
    """
    expected = group.expected(parameters)
    unread = group.stored_as.unread if group.weights.symmetric else ()
    for name, form in (expected or {}).items():
        tensor = parameters.get(name)
        if tensor is None and name in unread:
            continue
        if tensor is None or not form.accepts(tensor):
            return None
    if expected is None:
        return None
    return {name: parameters[name] for name in (*expected, "bias") if name in parameters}
