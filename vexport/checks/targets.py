"""Do targets and ignore say of each layer what its tensors say?"""

from collections.abc import Iterator

from vexport.architectures.fusion import moe_layer
from vexport.checks.vllm.arguments import of_attention
from vexport.checks.vllm.view import CheckpointView, ConfigGroup, FusedLinear, error, quantized_parameters
from vexport.formats.partition import is_head
from vexport.plan import is_embedding
from vexport.types import Finding

NAME = "targets"
DESCRIPTION = "targets and ignore, resolved as vLLM does, agree with the tensors of every layer"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on layers that the config and the tensors treat differently."""
    if not view.config_groups and not _only_attention(view):
        return
    for fused in view.fused_linears:
        ignored = view.ignored(fused)
        if ignored and len(ignored) < len(fused.members):
            yield error(
                NAME,
                fused.name,
                expected=f"all or none of {_names(fused)} in ignore, because vLLM runs them as one layer",
                got=f"only {', '.join(ignored)}",
                fix="list all of them in ignore, or none",
            )
            continue
        yield from _agreement(view, fused)
    yield from _experts(view)
    yield from _embeddings(view)


def _only_attention(view: CheckpointView) -> bool:
    """Whether vLLM passes over every config group, so that it quantizes no layer."""
    groups = (view.quantization or {}).get("config_groups")
    return isinstance(groups, dict) and bool(groups) and all(of_attention(raw) for raw in groups.values())


def _embeddings(view: CheckpointView) -> Iterator[Finding]:
    """Tables that a target matches: vLLM quantizes them too, to integers (get_quant_method)."""
    for tensor in view.index.tensors.values():
        module, _, parameter = tensor.name.rpartition(".")
        if parameter != "weight" or len(tensor.shape) != 2 or not is_embedding(module):
            continue
        group = view.group_of(FusedLinear(name=module, members={module: {parameter: tensor}}))
        if group is not None:
            yield error(
                NAME,
                module,
                expected=f"quantized tensors ({group.format}), as {group.name} targets this table",
                got="an unquantized weight",
                fix="add the table to ignore, or narrow the targets",
            )


def _experts(view: CheckpointView) -> Iterator[Finding]:
    """vLLM asks for the scheme of a layer's first expert, and refuses projections that differ in it."""
    by_layer: dict[str, dict[str, ConfigGroup | None]] = {}
    for fused in view.fused_linears:
        layer = moe_layer(next(iter(fused.members)))
        if layer is not None:
            group = None if view.ignored(fused) else view.group_of(fused)
            by_layer.setdefault(layer, {}).setdefault(fused.name.rpartition(".")[2], group)
    for layer, groups in by_layer.items():
        names = {projection: group.name if group else "none" for projection, group in groups.items()}
        if len(set(names.values())) > 1:
            yield error(
                NAME,
                layer,
                expected="one config group for all projections of the experts",
                got=", ".join(f"{projection} {name}" for projection, name in names.items()),
                fix="quantize all projections of the experts alike, or none",
            )


def _agreement(view: CheckpointView, fused: FusedLinear) -> Iterator[Finding]:
    group = view.group_of(fused)
    for module, parameters in fused.members.items():
        stored = quantized_parameters(parameters)
        if group is None and stored:
            head = is_head(fused.name)
            yield error(
                NAME,
                module,
                expected="a target that matches this quantized layer",
                got=f"{', '.join(stored)} and no target"
                if not head
                else "a quantized output head and no separate target",
                fix='add "re:.*lm_head" to the targets'
                if head
                else "add it to targets or remove it from ignore",
            )
        if group is not None and not stored:
            yield error(
                NAME,
                module,
                expected=f"quantized tensors ({group.format}), as {group.name} targets this layer",
                got="an unquantized weight",
                fix="add the layer to ignore, or export it quantized",
            )


def _names(fused: FusedLinear) -> str:
    return ", ".join(module.rpartition(".")[2] for module in fused.members)
