"""Do targets and ignore say of each layer what its tensors say?"""

from collections.abc import Iterator

from vexport.checks.subject import Subject, Unit, error, matches_any, quantized_leaves
from vexport.schemes.base import is_head
from vexport.types import Finding

NAME = "targets"
DESCRIPTION = "targets and ignore, resolved as vLLM does, agree with the tensors of every layer"


def run(subject: Subject) -> Iterator[Finding]:
    """Findings on layers that the config and the tensors treat differently."""
    if not subject.config_groups:
        return
    for unit in subject.units:
        ignored = [module for module in unit.members if matches_any(module, subject.ignore)]
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
