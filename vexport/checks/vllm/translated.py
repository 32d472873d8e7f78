"""A checkpoint of another quantization method as the same one in compressed-tensors would be."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from vexport.checkpoint.derived import Derived, DerivedReader
from vexport.checkpoint.quantization import KEY
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.layers import KEPT_VIEWS, FusedLinear, joined_name
from vexport.checks.vllm.quant_methods import METHOD
from vexport.checks.vllm.quant_methods.base import MethodGroup
from vexport.checks.vllm.view import CheckpointView
from vexport.formats.config import DENSE_FORMAT, MIXED_FORMAT, arguments_json, targets_of
from vexport.formats.kv_cache import KV_CACHES
from vexport.layers.ignore import ignored
from vexport.records import Finding, FusionGroup, Json, LinearPlan, TensorInfo

JudgeFunction = Callable[[CheckpointView], Iterator[Finding]]
CACHE_SCALE = re.compile(r"\.[kv]_scale$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """The view in compressed-tensors' terms; `layers` are those that could be translated, with their groups;
    `stored_names` have what a name in its findings is called in the files."""

    view: CheckpointView
    layers: Mapping[str, MethodGroup]
    stored_names: Mapping[str, str]


def in_our_terms(run: JudgeFunction) -> JudgeFunction:
    """A check that looks at numbers, on a checkpoint of any method; its findings name what is stored."""

    def looked(view: CheckpointView) -> Iterator[Finding]:
        if view.method is None:
            yield from run(view)
            return
        translated = translate(view)
        for finding in run(translated.view):
            yield replace(finding, where=translated.stored_names.get(finding.where, finding.where))

    return looked


@lru_cache(maxsize=KEPT_VIEWS)
def translate(view: CheckpointView) -> Translated:
    """A view whose quantized layers have the tensors of compressed-tensors, of the same values.

    Layers with tensors of another dtype or shape, of which other findings tell, are left out.
    """
    stored_names: dict[str, str] = {}
    tensors, derived = dict[str, TensorInfo](view.index.tensors), dict[str, Derived]()
    layers: dict[str, MethodGroup] = {}
    for fused in view.fused_linears:
        group = view.group_of(fused)
        if not isinstance(group, MethodGroup) or not fused.is_quantized:
            continue
        names = {own: _described(group, own) for own in group.stored_as.names}
        stored_names |= {f"{fused.name}: {own}": f"{fused.name}: {stored}" for own, stored in names.items()}
        for module, parameters in fused.members.items():
            for tensor in parameters.values():
                del tensors[tensor.name]
            if not _is_sound(group, parameters):
                continue
            layers[module] = group
            stored_names |= {
                f"{module}.{own}": joined_name(module, stored)
                for own, stored in (*names.items(), ("bias", "bias"))
            }
            for own, made in group.stored_as.translated(group, _read(group, parameters)).items():
                name = f"{module}.{own}"
                if isinstance(made, Derived):
                    derived[name] = made
                    tensors[name] = made.info(name)
                else:
                    tensors[name] = replace(made, name=name)
    for own, stored in view.method.cache_scales.items() if view.method else ():
        for name in [name for name in tensors if name.endswith(f".{stored}")]:
            renamed_scale = f"{name.removesuffix(stored)}{stored.partition('.')[0]}.{own}"
            tensors[renamed_scale] = replace(tensors.pop(name), name=renamed_scale)
            stored_names[renamed_scale] = name
    config = {**view.index.config, KEY: _config(view, tensors)}
    index = replace(view.index, config=config, tensors=tensors)
    translated = CheckpointView(index, DerivedReader(view.reader, derived), view.target)
    translated.reciprocals = {name for group in layers.values() for name in group.stored_as.reciprocals}
    return Translated(view=translated, layers=layers, stored_names=stored_names)


def _described(group: MethodGroup, own: str) -> str:
    reciprocal = " (numbers are its reciprocal)" if own in group.stored_as.reciprocals else ""
    return f"{group.stored_as.names[own]}{reciprocal}"


def _read(group: MethodGroup, parameters: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    """The tensors that a layer's scheme has, and its bias."""
    expected = group.expected(parameters) or {}
    return {name: parameters[name] for name in (*expected, "bias") if name in parameters}


def _is_sound(group: MethodGroup, parameters: Mapping[str, TensorInfo]) -> bool:
    """Return whether all tensors of a layer are there in the dtypes and shapes that they should have."""
    expected = group.expected(parameters)
    if expected is None:
        return False
    unread = group.stored_as.unread if group.weights.symmetric else frozenset[str]()
    for name, form in expected.items():
        tensor = parameters.get(name)
        if tensor is None and name in unread:
            continue
        if tensor is None or tensor.dtype not in form.dtypes:
            return False
        if tensor.shape != form.shape and (tensor.shape, form.shape) != ((), (1,)):
            return False
    return True


def _config(view: CheckpointView, tensors: Iterable[str]) -> Json:
    """The quantization_config that vLLM resolves to the same layers."""
    groups: dict[str, tuple[MethodGroup, list[FusionGroup]]] = {}
    kept: set[str] = set()
    modules: dict[str, tuple[str, ...]] = {}
    for fused in view.fused_linears:
        modules[fused.name] = tuple(fused.members)
        group = view.group_of(fused)
        if isinstance(group, MethodGroup) and fused.is_quantized:
            groups.setdefault(group.name, (group, []))[1].append(_planned(fused, group))
        else:
            kept.update(fused.members)
    assert view.method is not None
    formats = {group.translated_format for group, _ in groups.values()}
    architecture, alone = view.architecture, len(groups) == 1
    names = view.names
    config_groups: dict[str, Json] = {}
    for number, (name, (group, layers)) in enumerate(groups.items()):
        others = [layer for other, (_, each) in groups.items() if other != name for layer in each]
        targets = targets_of(layers, architecture, others, alone=alone)
        config_groups[f"group_{number}"] = _group(group.translated, targets)
    has_scales = any(map(CACHE_SCALE.search, tensors))
    cache = arguments_json(KV_CACHES["fp8"]) if view.method.kv_cache and has_scales else None
    return {
        "config_groups": config_groups,
        "format": MIXED_FORMAT if len(formats) > 1 else next(iter(formats), DENSE_FORMAT),
        "global_compression_ratio": None,
        "ignore": list(ignored(modules, kept, (), names)),
        "kv_cache_scheme": cache,
        "quant_method": METHOD,
        "quantization_status": "compressed",
    }


def _planned(fused: FusedLinear, group: MethodGroup) -> FusionGroup:
    """Layers that vLLM runs as one, by their names alone."""
    members = tuple(
        LinearPlan(name=name, weight=name, out_features=0, in_features=0) for name in fused.members
    )
    return FusionGroup(name=fused.name, scheme=group.name, observer="", members=members)


def _group(group: ConfigGroup, targets: list[str]) -> Json:
    listed: list[Json] = [*targets]
    return {
        "targets": listed,
        "weights": arguments_json(group.weights),
        "input_activations": arguments_json(group.input_activations),
        "output_activations": None,
        "format": group.format,
    }
