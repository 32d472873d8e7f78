"""Check that targets and ignore in the config agree with the tensors of each layer."""

from collections.abc import Iterator, Sequence

from vexport.architectures.fusion import ABSENT_UP, FusedLayer, is_head
from vexport.architectures.linears import stacked_ending
from vexport.architectures.stored import quantized_parameters
from vexport.checks.vllm.groups import ConfigGroup, targets_attention
from vexport.checks.vllm.view import CheckpointView
from vexport.formats import PACKED
from vexport.formats.arguments import described
from vexport.numerics import INT32_BITS
from vexport.records import FLOATING, Finding
from vexport.rules import targets as rules
from vexport.version import short_version

DESCRIPTION = "targets and ignore, matched as in vLLM, agree with the tensors of every layer"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on layers that the config and the tensors treat differently."""
    if not view.quantization.config_groups and not _targets_only_attention(view):
        return
    for fused in view.model.fused_layers:
        if (
            view.model.is_draft(fused.name)
            and not view.layers.is_quantized(fused)
            and "mtp" not in view.target.speculative
        ):
            continue  # vLLM builds this layer only for drafting
        ignored, parts = view.lookup.ignored(fused), view.lookup.names(fused)
        if ignored and len(ignored) < len(parts):
            yield Finding.at(
                rules.PARTLY_IGNORED,
                fused.name,
                ignored=ignored,
                parts=[part.rpartition(".")[2] for part in parts],
                key=_skip_key(view),
            )
            continue
        if view.model.architecture.is_embedding(fused.name) and view.layers.is_quantized(fused):
            yield from _quantized_embedding(view, fused)
        else:
            yield from _compare_layer(view, fused)
    yield from _experts(view)
    yield from _embeddings(view)
    yield from _stacked_experts(view)


def _targets_only_attention(view: CheckpointView) -> bool:
    """Return True if all config groups target attention, so that vLLM ignores all of them."""
    groups = (view.quantization.values or {}).get("config_groups")
    return (
        isinstance(groups, dict)
        and bool(groups)
        and all(targets_attention(raw) for raw in groups.values())
    )


def _embeddings(view: CheckpointView) -> Iterator[Finding]:
    """Report unquantized embeddings that a target matches.

    vLLM expects packed integers for them, or refuses the scheme (get_quant_method).
    """
    for tensor in view.index.tensors.values():
        module, _, parameter = tensor.name.rpartition(".")
        if (
            parameter != "weight"
            or len(tensor.shape) != 2
            or not view.model.architecture.is_embedding(module)
        ):
            continue
        group = view.lookup.group_of(FusedLayer(name=module, members=(module,)))
        if group is not None:
            yield _unquantized(view, module, group, "embedding")


def _stacked_experts(view: CheckpointView) -> Iterator[Finding]:
    """Report stacked, unquantized experts that a target matches.

    vLLM looks up the config group of a layer's first expert for all its experts.
    """
    for name, tensor in view.index.tensors.items() if view.quantization.method is None else ():
        ending = stacked_ending(name, view.model.architecture) if len(tensor.shape) == 3 else None
        if ending and tensor.dtype in FLOATING and not view.model.is_draft(name):
            first = f"{name.removesuffix(ending[0])}{ending[1].rpartition('.')[0]}.0.down_proj"
            group = view.lookup.group_of(FusedLayer(name=first, members=(first,)))
            if group is not None:
                yield _unquantized(view, name, group, "layer of experts")


def _unquantized(view: CheckpointView, module: str, group: ConfigGroup, kind: str) -> Finding:
    # vLLM casts a weight to the scheme's dtype if the parameter has the same name.
    is_cast = group.storage.weight == "weight"
    return Finding.at(
        rules.CAST_LAYER if is_cast else rules.UNQUANTIZED_LAYER,
        module,
        format=group.format,
        group=group.name,
        kind=kind,
        key=_skip_key(view),
    )


def _quantized_embedding(view: CheckpointView, fused: FusedLayer) -> Iterator[Finding]:
    if (reason := _embedding_refusal(view, fused)) is not None:
        stored = quantized_parameters(view.model.modules[fused.name])
        yield Finding.at(rules.QUANTIZED_EMBEDDING, fused.name, tensors=stored, reason=reason)


def _embedding_refusal(view: CheckpointView, fused: FusedLayer) -> str | None:
    """Return why vLLM refuses quantized embeddings, or None if it supports them.

    Sources: get_quant_method in compressed_tensors.py, compressed_tensors_embedding.py, and the
    arguments that each model passes to VocabParallelEmbedding.
    """
    name = view.model.class_name
    version = short_version(view.model.target_version)
    group = view.lookup.group_of(fused)
    if view.model.embedding_lookup is None:
        return f"{name} builds its embedding without a quantization config (vLLM {version})"
    if group is None and view.model.embedding_lookup == "class":
        return f"{name} gives its embedding no name, so only the target Embedding matches it"
    if group is None:
        return "no target matches the embedding"
    if not any(is_head(name.rpartition(".")[0]) for name in view.index.tensors):
        return "the output head is tied to the embedding, and vLLM cannot multiply by packed codes"
    weights = group.weights
    if group.storage is not PACKED or group.input_activations is not None or weights.is_float:
        return (
            f"vLLM only supports weight-only packed integers here, not {group.format}: "
            f"{described(group)}"
        )
    if not weights.symmetric or INT32_BITS % weights.num_bits:
        return (
            f"vLLM only supports symmetric integers of 2, 4 or 8 bits here, not {described(group)}"
        )
    return None


def _experts(view: CheckpointView) -> Iterator[Finding]:
    """Report projections of a layer's experts that belong to different config groups.

    vLLM looks up the scheme of the first expert. It refuses an expert layer if its projections have
    different schemes.
    """
    by_layer: dict[str, dict[str, str]] = {}
    for fused in view.model.fused_layers:
        if fused.experts is not None:
            projection = fused.name.rpartition(".")[2]
            by_layer.setdefault(fused.experts, {}).setdefault(projection, _group_name(view, fused))
    expert_names = view.model.architecture.experts
    has_gate = expert_names is None or expert_names.up is not None
    for layer, names in by_layer.items():
        absent = f"{layer}.0.{ABSENT_UP}"
        if view.quantization.method is None and not has_gate:
            # vLLM also looks up a group for the missing projection.
            names[ABSENT_UP] = _group_name(view, FusedLayer(name=absent, members=(absent,)))
        if len(set(names.values())) > 1:
            found = [f"{projection} in {name}" for projection, name in names.items()]
            if ABSENT_UP in names:
                rule = rules.EXPERT_GROUPS_WITHOUT_GATE
                yield Finding.at(rule, layer, groups=found, absent=absent)
            else:
                yield Finding.at(rules.EXPERT_GROUPS, layer, groups=found)


def _group_name(view: CheckpointView, fused: FusedLayer) -> str:
    group = None if view.lookup.ignored(fused) else view.lookup.group_of(fused)
    return group.name if group is not None else "no group"


def _compare_layer(view: CheckpointView, fused: FusedLayer) -> Iterator[Finding]:
    group = view.lookup.group_of(fused)
    for module in fused.members:
        stored = quantized_parameters(view.model.modules[module])
        if group is None and stored:
            yield _quantized_without_group(view, fused, module, stored)
        if group is not None and not stored:
            yield _unquantized(view, module, group, "layer")


def _quantized_without_group(
    view: CheckpointView, fused: FusedLayer, module: str, stored: Sequence[str]
) -> Finding:
    key = _skip_key(view)
    if is_head(fused.name):
        return Finding.at(rules.QUANTIZED_HEAD, module, tensors=stored, key=key)
    if (reason := view.lookup.unquantized_reason(fused)) is not None:
        return Finding.at(rules.NEVER_QUANTIZED, module, tensors=stored, reason=reason, key=key)
    if view.quantization.method is not None:
        source = view.quantization.method.source
        return Finding.at(rules.EXCLUDED_LAYER, module, tensors=stored, source=source, key=key)
    return Finding.at(rules.UNTARGETED_LAYER, module, tensors=stored, key=key)


def _skip_key(view: CheckpointView) -> str:
    return view.quantization.method.skip_key if view.quantization.method is not None else "ignore"
