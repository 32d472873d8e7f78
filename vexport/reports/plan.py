"""A plan for people: what is quantized how, what it will weigh, what vLLM would refuse."""

from collections import Counter

from vexport.files import to_json
from vexport.reports.formatting import bits_per_weight, count, plural, ratio, size
from vexport.schemes import get_scheme
from vexport.types import Plan


def render_plan(plan: Plan, format_: str) -> str:
    """The plan as text or JSON, with a final newline."""
    return to_json(plan) if format_ == "json" else _text(plan)


def _text(plan: Plan) -> str:
    layers = Counter(group.scheme for group in plan.groups for _ in group.members)
    groups = Counter(group.scheme for group in plan.groups)
    lines = [f"{plan.source}: {plan.architecture}, {count(plan.parameters)} parameters"]
    for scheme, number in layers.items():
        stored = get_scheme(scheme).family.format
        lines.append(f"  {scheme:<12} {number} linear layers in {plural(groups[scheme], 'group')} ({stored})")
    lines.append(
        f"  {'kept':<12} {plural(len(plan.kept_linears), 'linear layer')}: {_names(plan.kept_linears)}"
    )
    change = f"{size(plan.source_bytes)} -> {size(plan.output_bytes)}"
    share = ratio(plan.output_bytes, plan.source_bytes)
    bits = bits_per_weight(plan.output_bytes, plan.parameters)
    lines.append(f"  {'size':<12} {change} ({share}, {bits} bits per weight)")
    shared = [group for group in plan.groups if len(group.members) > 1]
    if shared:
        lines.append(f"  {'fused':<12} {_names(tuple(group.name for group in shared))}")
    lines += [f"  {'refused':<12} {refusal}" for refusal in plan.refusals]
    return "\n".join(lines) + "\n"


def _names(names: tuple[str, ...], most: int = 4) -> str:
    shown = ", ".join(names[:most]) or "none"
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
