"""A plan for people: what is quantized how, what it will weigh, what vLLM would refuse."""

import json
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from vexport.evaluation.statistics import documents_for_power
from vexport.files import to_json
from vexport.formats.gpus import generation
from vexport.formats.schemes import get_scheme
from vexport.plan.estimates import FORWARD_FLOPS
from vexport.plan.linears import NUMBER
from vexport.reports import document as doc
from vexport.reports import text
from vexport.reports.document import columns, facts, row
from vexport.reports.formatting import count, duration, percent, plural, ratio, size
from vexport.scenario import Evaluate
from vexport.scenario.evaluate import SUITES
from vexport.types import Finding, FusionGroup, Outlook, Plan, SchemeTable

# Lines of text; a plan as JSON has everything.
MOST_KINDS = 16
MOST_REASONS = 6
# Reasons to keep layers of which a reader wants to know the layers.
WORTH_NAMING = ("unsupported shape", "kept by a rule or --ignore")
# The share of answers assumed to change, right or wrong; the line that uses it says so.
TYPICAL_DISAGREEMENT = 0.05


def render_plan(plan: Plan, outlook: Outlook, format_: str, evaluate: Evaluate | None = None) -> str:
    """The plan as text or JSON (plan.schema.json), with a final newline.

    The text says how many documents the evaluation of a scenario needs, and what to type next.
    """
    if format_ == "json":
        merged = {**json.loads(to_json(plan)), "outlook": json.loads(to_json(outlook))}
        return json.dumps(merged, indent=2) + "\n"
    return text.render([_document(plan, outlook, evaluate)])


def render_table(table: SchemeTable, format_: str) -> str:
    """What each scheme would give, as text or JSON (plan-schemes.schema.json), with a final newline."""
    if format_ == "json":
        return to_json(table)
    rows = (
        row(
            scheme.scheme,
            size(scheme.output_bytes),
            f"{scheme.bits:.2f}",
            "needed" if scheme.needs_calibration else "no",
            scheme.generation,
            full_from(scheme.full_sm),
            "yes" if scheme.fits else f"no: {scheme.reason}{_part(scheme.layers, table.layers)}",
        )
        for scheme in table.schemes
    )
    title = (
        f"{table.source}: {table.architecture}, {count(table.parameters)} parameters, "
        f"{size(table.source_bytes)}, {plural(table.layers, 'linear layer')}"
    )
    legend = (
        "bits: over all weights; data: calibration text; in full from: the least GPU on which vLLM "
        "multiplies inputs of as many bits as are stored; where it does not fit, the size is that with "
        "--on-unsupported-shape keep."
    )
    content = (
        doc.Paragraph(title),
        doc.Table(
            columns("scheme", ">size", ">bits", "data", "loads from", "in full from", "fits"), tuple(rows)
        ),
        doc.Paragraph(legend),
        doc.Paragraph(f"next: vexport plan {shlex.quote(table.source)} --scheme SCHEME"),
    )
    return text.render([doc.Document(title=table.source, parts=content, wide=True)])


def full_from(sm: int | None) -> str:
    """The least GPU that runs what is stored in full."""
    return "no GPU" if sm is None else generation(sm)


def _in_full(outlook: Outlook) -> str:
    """From where inputs are quantized as stored, where that is not all GPUs that load it."""
    if outlook.full_sm is None:
        return ", none with inputs as they are stored"
    later = outlook.full_sm > outlook.least_sm
    return f"; inputs as they are stored from {generation(outlook.full_sm)} on" if later else ""


def _part(layers: int, of: int) -> str:
    return f" ({count(layers)} of {count(of)} layers fit)" if 0 < layers < of else ""


def _document(plan: Plan, outlook: Outlook, evaluate: Evaluate | None) -> doc.Document:
    title = f"{plan.source}: {plan.architecture}, {count(plan.parameters)} parameters"
    attention = plural(len(plan.attention), "attention layer")
    share = ratio(plan.output_bytes, plan.source_bytes)
    quantized = f"{outlook.bits_quantized:.2f} bits per quantized weight"
    if not outlook.quantized_parameters:
        quantized = "no weight is quantized"
    bits = f"{quantized}, {outlook.bits:.2f} {'over all' if outlook.quantized_parameters else 'bits each'}"
    faster = "; a GPU calibrates faster" if outlook.needs_calibration else ""
    rows = facts(
        *(line for scheme in plan.schemes for line in _scheme_lines(plan, scheme)),
        *_labelled("stay 16 bit", _kept_lines(plan, outlook)),
        ("KV cache", f"{plan.kv_cache} in {attention}") if plan.kv_cache else None,
        ("size", f"{size(plan.source_bytes)} -> {size(plan.output_bytes)} ({share}); {bits}"),
        ("calibration", f"needed; {outlook.samples}" if outlook.samples else "not needed"),
        ("smoothing", f"inputs, with strength {plan.smoothing:g}") if plan.smoothing else None,
        ("runs from", f"{outlook.generation}{' on' if outlook.least_sm else ''}{_in_full(outlook)}"),
        ("needs", f"the package {outlook.package} next to vLLM") if outlook.package else None,
        ("estimates", f"about {_stages(outlook)}; {size(outlook.disk_bytes)} of disk"),
        ("", f"(on two idle CPU cores, with a disk that keeps up{faster})"),
        *(("note", note) for note in _findings(plan.notes)),
        *(("refused", refusal) for refusal in _findings(plan.refusals)),
        ("documents", documents_needed(evaluate))
        if evaluate and evaluate.tasks and evaluate.margin > 0
        else None,
        *_labelled("suite", suite_lines(evaluate, plan.parameters)),
        ("next", outlook.next_command) if outlook.next_command else None,
    )
    return doc.Document(title=plan.source, parts=(doc.Paragraph(title), rows), wide=True)


def suite_lines(settings: Evaluate | None, parameters: int) -> list[str]:
    """The documents of a suite's tasks, and about how long two CPU cores take for them."""
    if settings is None or settings.suite is None:
        return []
    suite = replace(SUITES[settings.suite], limit=None)
    limit = settings.limit
    share = limit if limit and limit < 1 else 1.0
    most = int(limit) if limit and limit >= 1 else None
    asked = {task: min(math.ceil(share * task.documents), most or task.documents) for task in suite.tasks}
    tokens = sum(number * (task.prompt_tokens + task.new_tokens) for task, number in asked.items())
    listed = ", ".join(f"{task.name} {count(number)}" for task, number in asked.items())
    seconds = 2 * 2.0 * parameters * tokens / FORWARD_FLOPS
    return [
        f"{settings.suite} ({suite.about}): {count(sum(asked.values()))} documents for each of two models",
        f"  {listed}",
        f"  about {duration(seconds)} on two CPU cores; a GPU takes minutes",
    ]


def documents_needed(settings: Evaluate) -> str:
    """How many documents pass a model that lost nothing, with power 0.8; the margin is not 0."""
    needed = documents_for_power(settings.margin, TYPICAL_DISAGREEMENT, settings.alpha)
    condition = f"margin {percent(settings.margin)}, alpha {settings.alpha:g}"
    change = percent(TYPICAL_DISAGREEMENT, 0)
    fewer = f"; limit {settings.limit:g} asks fewer" if 1 <= (settings.limit or 0) < needed else ""
    return f"about {count(needed)} a task for power 0.8 at {condition}, if {change} of answers change{fewer}"


def _labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    """A label with its first line; the others stand below it."""
    return [(label if number == 0 else "", line) for number, line in enumerate(lines)]


def _scheme_lines(plan: Plan, scheme: str) -> list[tuple[str, str]]:
    """How many layers a scheme quantizes, and which kinds."""
    groups = [group for group in plan.groups if group.scheme == scheme]
    layers = plural(sum(len(group.members) for group in groups), "linear layer")
    first = f"{layers} in {plural(len(groups), 'group')} ({get_scheme(scheme).format.name})"
    kinds = (f"  {kind}" for kind in _shortened(_group_kinds(groups), MOST_KINDS))
    return _labelled(scheme, [first, *kinds])


def _kept_lines(plan: Plan, outlook: Outlook) -> list[str]:
    kept = sum(share.parameters for share in outlook.kept)
    lines = [f"{count(kept)} of {count(plan.parameters)} weights ({ratio(kept, plan.parameters)})"]
    for share in outlook.kept[:MOST_REASONS]:
        kinds = f": {', '.join(share.kinds)}" if share.reason in WORTH_NAMING else ""
        lines.append(f"  {count(share.parameters)} {share.reason}{kinds}")
    return lines


def _stages(outlook: Outlook) -> str:
    return ", ".join(
        f"{one.stage} {duration(one.seconds)} in {size(one.memory_bytes)}" for one in outlook.estimates
    )


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
