"""Do targets and ignore say of each layer what its tensors say?"""

from collections.abc import Iterator

from vexport.architectures.fusion import moe_layer
from vexport.checks.vllm.arguments import of_attention
from vexport.checks.vllm.subject import ConfigGroup, Subject, Unit, error, quantized_leaves
from vexport.plan import is_embedding
from vexport.schemes.base import is_head
from vexport.types import Finding

NAME = "targets"
DESCRIPTION = "targets and ignore, resolved as vLLM does, agree with the tensors of every layer"


def run(subject: Subject) -> Iterator[Finding]:
    """Findings on layers that the config and the tensors treat differently."""
    if not subject.config_groups and not _only_attention(subject):
        return
    for unit in subject.units:
        ignored = subject.ignored(unit)
        if ignored and len(ignored) < len(unit.members):
            yield error(
                NAME,
                unit.name,
                expected=f"all or none of {_leaves(unit)} in ignore, because vLLM runs them as one layer",
                got=f"only {', '.join(ignored)}",
                fix="list all of them in ignore, or none",
            )
            continue
        yield from _agreement(subject, unit)
    yield from _experts(subject)
    yield from _embeddings(subject)


def _only_attention(subject: Subject) -> bool:
    """Whether vLLM passes over every config group, so that it quantizes no layer."""
    groups = (subject.quantization or {}).get("config_groups")
    return isinstance(groups, dict) and bool(groups) and all(of_attention(raw) for raw in groups.values())


def _embeddings(subject: Subject) -> Iterator[Finding]:
    """Tables that a target matches: vLLM quantizes them too, to integers (get_quant_method)."""
    for tensor in subject.index.tensors.values():
        module, _, leaf = tensor.name.rpartition(".")
        if leaf != "weight" or len(tensor.shape) != 2 or not is_embedding(module):
            continue
        group = subject.group_of(Unit(name=module, members={module: {leaf: tensor}}))
        if group is not None:
            yield error(
                NAME,
                module,
                expected=f"quantized tensors ({group.format}), as {group.name} targets this table",
                got="an unquantized weight",
                fix="add the table to ignore, or narrow the targets",
            )


def _experts(subject: Subject) -> Iterator[Finding]:
    """vLLM asks for the scheme of a layer's first expert, and refuses projections that differ in it."""
    found: dict[str, dict[str, ConfigGroup | None]] = {}
    for unit in subject.units:
        layer = moe_layer(next(iter(unit.members)))
        if layer is not None:
            group = None if subject.ignored(unit) else subject.group_of(unit)
            found.setdefault(layer, {}).setdefault(unit.name.rpartition(".")[2], group)
    for layer, groups in found.items():
        names = {leaf: group.name if group else "none" for leaf, group in groups.items()}
        if len(set(names.values())) > 1:
            yield error(
                NAME,
                layer,
                expected="one config group for all projections of the experts",
                got=", ".join(f"{leaf} {name}" for leaf, name in names.items()),
                fix="quantize all projections of the experts alike, or none",
            )


def _agreement(subject: Subject, unit: Unit) -> Iterator[Finding]:
    group = subject.group_of(unit)
    for module, leaves in unit.members.items():
        stored = quantized_leaves(leaves)
        if group is None and stored:
            head = is_head(unit.name)
            yield error(
                NAME,
                module,
                expected="a target that matches this quantized layer",
                got=f"{', '.join(stored)} and no target"
                if not head
                else "a quantized output head and no target of its own",
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


def _leaves(unit: Unit) -> str:
    return ", ".join(module.rpartition(".")[2] for module in unit.members)
