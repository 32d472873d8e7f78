"""A plan for people: what is quantized how, what it will weigh, what vLLM would refuse."""

from collections import Counter

from vexport.evaluation.statistics import documents_for_power
from vexport.files import to_json
from vexport.reports.formatting import bits_per_weight, count, percent, plural, ratio, size
from vexport.scenario import Evaluate
from vexport.schemes import get_scheme
from vexport.types import Plan

# The share of answers assumed to change, right or wrong; the line that uses it says so.
TYPICAL_DISAGREEMENT = 0.05


def render_plan(plan: Plan, format_: str, evaluate: Evaluate | None = None) -> str:
    """The plan as text (with the documents that an evaluation needs) or JSON, with a final newline."""
    if format_ == "json":
        return to_json(plan)
    return _text(plan) + (_documents(evaluate) if evaluate and evaluate.margin > 0 else "")


def _documents(settings: Evaluate) -> str:
    """How many documents pass a model that lost nothing, with power 0.8."""
    needed = documents_for_power(settings.margin, TYPICAL_DISAGREEMENT, settings.alpha)
    condition = f"margin {percent(settings.margin)}, alpha {settings.alpha:g}"
    change = percent(TYPICAL_DISAGREEMENT, 0)
    amount = f"about {count(needed)} for power 0.8 at {condition}"
    return f"  {'documents':<12} {amount}, if {change} of answers change\n"


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
