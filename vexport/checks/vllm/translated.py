"""Checkpoints of other quantization methods, viewed as compressed-tensors checkpoints."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from functools import cached_property

from vexport.architectures.stored import joined_name
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Derived, DerivedReader, Reader
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.lookup import GroupLookup, TranslatedGroups
from vexport.checks.vllm.quant_methods.base import MethodGroup
from vexport.checks.vllm.view import CheckpointView, Target
from vexport.records import TensorInfo


class TranslatedView(CheckpointView):
    """View of another method's checkpoint, with tensors and config groups of compressed-tensors.

    Args:
        groups: The translated config group of each quantized linear layer, by its name.
        stored_names: Maps the `where` of findings on this view to names in the files.
        reciprocals: Parameters that the files store as reciprocals.
    """

    def __init__(
        self,
        index: SourceIndex,
        reader: Reader,
        target: Target,
        *,
        groups: Mapping[str, ConfigGroup],
        stored_names: Mapping[str, str],
        reciprocals: Set[str],
    ) -> None:
        super().__init__(index, reader, target)
        self.stored_names = stored_names
        self.reciprocals = reciprocals
        self._groups = groups

    @cached_property
    def lookup(self) -> GroupLookup:
        """Lookup of the translated config group of a fused layer."""
        return TranslatedGroups(self.model, self.quantization, self._groups)


def translate(view: CheckpointView) -> TranslatedView:
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
    return TranslatedView(
        index,
        DerivedReader(view.reader, derived),
        view.target,
        groups=groups,
        stored_names=stored_names,
        reciprocals=reciprocals,
    )


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
