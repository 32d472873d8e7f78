"""A checkpoint of another quantization method with the tensors and config groups of
compressed-tensors.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from vexport.architectures.fusion import FusedLayer
from vexport.architectures.stored import joined_name
from vexport.checkpoint.reader import Derived, DerivedReader
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.quant_methods.base import MethodGroup
from vexport.checks.vllm.view import CheckFunction, CheckpointView
from vexport.records import Finding, TensorInfo


class TranslatedView(CheckpointView):
    """The view in compressed-tensors' terms.

    `groups` has the config group of each quantized layer, `stored_names` what a name in its
    findings is called in the files.
    """

    groups: Mapping[str, ConfigGroup]
    stored_names: Mapping[str, str]

    def group_of(self, fused: FusedLayer) -> ConfigGroup | None:
        """The translated group of layers that the method quantizes."""
        return self.groups.get(fused.members[0])


def translated_findings(run: CheckFunction, translated: TranslatedView) -> Iterator[Finding]:
    """Yield the findings of a check that looks at numbers, under the names of stored tensors."""
    for finding in run(translated):
        yield replace(finding, where=translated.stored_names.get(finding.where, finding.where))


def translate(view: CheckpointView) -> TranslatedView:
    """A view whose quantized layers have the tensors of compressed-tensors, of the same values.

    Layers with tensors of another dtype or shape, of which other findings tell, are left out.
    """
    stored_names, reciprocals, groups = dict[str, str](), set[str](), dict[str, ConfigGroup]()
    tensors, derived = dict[str, TensorInfo](view.index.tensors), dict[str, Derived]()
    for fused in view.fused_layers:
        group = view.group_of(fused)
        if not isinstance(group, MethodGroup) or not view.is_quantized(fused):
            continue
        names = {own: _described(group, own) for own in group.stored_as.names}
        stored_names |= {
            f"{fused.name}: {own}": f"{fused.name}: {stored}" for own, stored in names.items()
        }
        for module in fused.members:
            parameters = view.modules[module]
            groups[module] = group.translated
            for tensor in parameters.values():
                del tensors[tensor.name]
            read = _read(group, parameters)
            if read is None:
                continue
            reciprocals |= group.stored_as.reciprocals
            for own, stored in {**names, "bias": "bias"}.items():
                stored_names[f"{module}.{own}"] = joined_name(module, stored)
            for own, made in group.stored_as.translated(group, read).items():
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
    translated = TranslatedView(index, DerivedReader(view.reader, derived), view.target)
    translated.groups, translated.stored_names = groups, stored_names
    translated.reciprocals = reciprocals
    return translated


def _cache_scales(view: CheckpointView, tensors: Iterable[str]) -> dict[str, str]:
    """compressed-tensors' names of the method's own scales of the KV cache, by theirs."""
    scales = view.method.cache_scales if view.method else {}
    return {
        name: f"{name.removesuffix(stored)}{stored.partition('.')[0]}.{own}"
        for own, stored in scales.items()
        for name in tensors
        if name.endswith(f".{stored}")
    }


def _described(group: MethodGroup, own: str) -> str:
    reciprocal = " (numbers are its reciprocal)" if own in group.stored_as.reciprocals else ""
    return f"{group.stored_as.names[own]}{reciprocal}"


def _read(group: MethodGroup, parameters: Mapping[str, TensorInfo]) -> dict[str, TensorInfo] | None:
    """The tensors of a layer's scheme, and its bias; None where one lacks, or has another dtype or
    shape.
    """
    expected = group.expected(parameters)
    unread = group.stored_as.unread if group.weights.symmetric else ()
    for name, form in (expected or {}).items():
        tensor = parameters.get(name)
        if tensor is None and name in unread:
            continue
        if tensor is None or tensor.dtype not in form.dtypes:
            return None
        if tensor.shape != form.shape and (tensor.shape, form.shape) != ((), (1,)):
            return None
    if expected is None:
        return None
    return {name: parameters[name] for name in (*expected, "bias") if name in parameters}
