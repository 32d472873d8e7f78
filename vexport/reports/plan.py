"""A plan for people: what is quantized how, what it will weigh, what vLLM would refuse."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from vexport.files import to_json
from vexport.reports.formatting import bits_per_weight, count, plural, ratio, size
from vexport.schemes import get_scheme
from vexport.types import Finding, FusionGroup, Plan

# Lines of text; a plan as JSON has everything.
MOST_KINDS = 16
MOST_KEPT = 8
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def render_plan(plan: Plan, format_: str) -> str:
    """The plan as text or JSON, with a final newline."""
    return to_json(plan) if format_ == "json" else _text(plan)


def _text(plan: Plan) -> str:
    lines = [f"{plan.source}: {plan.architecture}, {count(plan.parameters)} parameters"]
    for scheme in plan.schemes:
        groups = [group for group in plan.groups if group.scheme == scheme]
        layers = sum(len(group.members) for group in groups)
        stored = get_scheme(scheme).family.format
        lines.append(
            f"  {scheme:<12} {plural(layers, 'linear layer')} in {plural(len(groups), 'group')} ({stored})"
        )
        lines += [f"  {'':<12}   {kind}" for kind in _shortened(_group_kinds(groups), MOST_KINDS)]
    kept = _shortened(_counted(map(kind_of, plan.kept_linears)), MOST_KEPT)
    lines.append(
        f"  {'kept':<12} {plural(len(plan.kept_linears), 'linear layer')}: {', '.join(kept) or 'none'}"
    )
    if plan.kv_cache:
        lines.append(
            f"  {'KV cache':<12} {plan.kv_cache} in {plural(len(plan.attention), 'attention layer')}"
        )
    change = f"{size(plan.source_bytes)} -> {size(plan.output_bytes)}"
    share = ratio(plan.output_bytes, plan.source_bytes)
    bits = bits_per_weight(plan.output_bytes, plan.parameters)
    lines.append(f"  {'size':<12} {change} ({share}, {bits} bits per weight)")
    lines += [f"  {'note':<12} {note}" for note in _findings(plan.notes)]
    lines += [f"  {'refused':<12} {refusal}" for refusal in _findings(plan.refusals)]
    return "\n".join(lines) + "\n"


def kind_of(name: str) -> str:
    """What a layer is, wherever it stands: `model.layers.*.mlp.experts.*.down_proj`."""
    return NUMBER.sub("*", name)


def _group_kinds(groups: Sequence[FusionGroup]) -> list[str]:
    """How many of each kind of group there are, and what vLLM fuses in it."""
    members = {kind_of(group.name): group.members for group in groups}
    kinds = Counter(kind_of(group.name) for group in groups)
    return [
        f"{count(number)} x {kind}{_fused([member.name for member in members[kind]])}"
        for kind, number in kinds.items()
    ]


def _fused(members: Sequence[str]) -> str:
    leaves = [member.rpartition(".")[2] for member in members]
    return f" = {' + '.join(leaves)}" if len(leaves) > 1 else ""


def _counted(kinds: Iterable[str]) -> list[str]:
    return [f"{kind} ({count(number)})" if number > 1 else kind for kind, number in Counter(kinds).items()]


def _findings(findings: Sequence[Finding]) -> list[str]:
    """One line a kind of layer and reason, with how many there are."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((kind_of(finding.where), finding.got), []).append(finding)
    lines = [
        f"{same[0]}{f' and {count(len(same) - 1)} more like it' if len(same) > 1 else ''}"
        for same in alike.values()
    ]
    return _shortened(lines, MOST_KINDS)


def _shortened(lines: Sequence[str], most: int) -> list[str]:
    left = len(lines) - most
    return [*lines[:most], f"and {count(left)} more kinds"] if left > 0 else list(lines)
