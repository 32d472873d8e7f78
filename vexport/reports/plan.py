"""A plan for people: what is quantized how, what it will weigh, what vLLM would refuse."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

from vexport.architectures import NUMBER
from vexport.files import to_json
from vexport.formats.gpus import generation
from vexport.formats.plan import FusionGroup, Plan
from vexport.formats.schemes import Scheme
from vexport.plan.rules import calibration_need
from vexport.records import Finding, SchemeTable
from vexport.records.values import plural
from vexport.reports import document as doc
from vexport.reports import text
from vexport.reports.document import facts, table
from vexport.reports.formatting import count, percent, ratio, size
from vexport.scenario import Evaluate
from vexport.scenario.evaluate import SUITES, TYPICAL_DISAGREEMENT

# Lines of text; a plan as JSON has everything.
MOST_KINDS = 16
MOST_KEPT = 6


def render_plan(
    plan: Plan,
    format_: str,
    then: str,
    evaluate: Evaluate | None = None,
    documents: int | None = None,
) -> str:
    """The plan as text or JSON (plan.schema.json), with a final newline.

    The text says how many `documents` the evaluation of a scenario needs, and with `then` what to
    type next.
    """
    if format_ == "json":
        return to_json(plan)
    attention = plural(len(plan.attention), "attention layer")
    share = ratio(plan.output_bytes, plan.source_bytes)
    bits = f"{8 * plan.output_bytes / max(plan.parameters, 1):.2f} bits over all weights"
    rows = facts(
        *(
            line
            for scheme in plan.used_schemes
            for line in _labelled(scheme.name, _scheme_lines(plan, scheme))
        ),
        *_labelled("stay 16 bit", _kept_lines(plan)),
        ("KV cache", f"{plan.kv_cache} in {attention}") if plan.kv_cache else None,
        ("size", f"{size(plan.source_bytes)} -> {size(plan.output_bytes)} ({share}); {bits}"),
        ("calibration", "needed" if calibration_need(plan) else "not needed"),
        ("smoothing", f"inputs, with strength {plan.smoothing:g}") if plan.smoothing else None,
        *(("note", note) for note in _findings(plan.notes)),
        *(("refused", refusal) for refusal in _findings(plan.refusals)),
        ("documents", _documents_line(evaluate, documents)) if evaluate and documents else None,
        ("suite", _suite_line(evaluate, evaluate.suite)) if evaluate and evaluate.suite else None,
        ("next", then) if not plan.refusals else None,
    )
    title = doc.Paragraph(
        f"{plan.source}: {plan.architecture}, {count(plan.parameters)} parameters"
    )
    return text.render([doc.Document(title=plan.source, parts=(title, rows), wide=True)])


def render_table(schemes: SchemeTable, format_: str) -> str:
    """The table of schemes as text or JSON (plan-schemes.schema.json), with a final newline."""
    if format_ == "json":
        return to_json(schemes)
    rows = (
        (
            scheme.scheme,
            size(scheme.output_bytes),
            f"{scheme.bits:.2f}",
            "needed" if scheme.needs_calibration else "no",
            scheme.generation,
            "no GPU" if scheme.full_sm is None else generation(scheme.full_sm),
            "yes" if scheme.fits else f"no: {scheme.reason}{_part(scheme.layers, schemes.layers)}",
        )
        for scheme in schemes.schemes
    )
    title = (
        f"{schemes.source}: {schemes.architecture}, {count(schemes.parameters)} parameters, "
        f"{size(schemes.source_bytes)}, {plural(schemes.layers, 'linear layer')}"
    )
    legend = (
        "bits: over all weights; data: calibration text; in full from: the oldest GPU whose "
        "kernels use "
        "the stored input precision; where it does not fit, the size is that with "
        "--on-unsupported-shape keep."
    )
    content = (
        doc.Paragraph(title),
        table(("scheme", ">size", ">bits", "data", "loads from", "in full from", "fits"), rows),
        doc.Paragraph(legend),
        doc.Paragraph(f"next: vexport plan {shlex.quote(schemes.source)} --scheme SCHEME"),
    )
    return text.render([doc.Document(title=schemes.source, parts=content, wide=True)])


def _part(layers: int, of: int) -> str:
    return f" ({count(layers)} of {count(of)} layers fit)" if 0 < layers < of else ""


def _suite_line(settings: Evaluate, name: str) -> str:
    """The documents of a suite's tasks."""
    suite, limit = SUITES[name], settings.limit or math.inf
    asked = {
        task: math.ceil(limit * documents) if limit < 1 else int(min(documents, limit))
        for task, documents in suite.tasks.items()
    }
    listed = ", ".join(f"{task} {count(number)}" for task, number in asked.items())
    return (
        f"{name} ({suite.about}): {count(sum(asked.values()))} documents for each model: {listed}"
    )


def _documents_line(settings: Evaluate, needed: int) -> str:
    """The number of documents that pass a model that lost nothing, with power 0.8."""
    condition = f"margin {percent(settings.margin)}, alpha {settings.alpha:g}"
    change = percent(TYPICAL_DISAGREEMENT, 0)
    fewer = f"; limit {settings.limit:g} asks fewer" if 1 <= (settings.limit or 0) < needed else ""
    return (
        f"about {count(needed)} a task for power 0.8 at {condition}, if {change} of answers "
        f"change{fewer}"
    )


def _labelled(label: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A label with its first line; the others stand below it, indented."""
    yield label, lines[0]
    yield from (("", f"  {line}") for line in lines[1:])


def _scheme_lines(plan: Plan, scheme: Scheme) -> list[str]:
    """The number of layers that a scheme quantizes, and the kinds of their groups."""
    groups = [group for group in plan.groups if group.scheme == scheme]
    layers = plural(sum(len(group.members) for group in groups), "linear layer")
    support = scheme.format.gpu_support(scheme.args)
    runs = f"{scheme.format.name}, loads from {generation(support.loads_from)} on"
    counts = Counter(map(_group_kind, groups))
    kinds = [f"{count(number)} x {kind}" for kind, number in counts.items()]
    return [f"{layers} in {plural(len(groups), 'group')} ({runs})", *_shortened(kinds, MOST_KINDS)]


def _group_kind(group: FusionGroup) -> str:
    leaves = [member.name.rpartition(".")[2] for member in group.members]
    return _kind(group.name) + (f" = {' + '.join(leaves)}" if len(leaves) > 1 else "")


def _kept_lines(plan: Plan) -> list[str]:
    """The number of linear layers that are kept, and their kinds."""
    kinds = [*dict.fromkeys(map(_kind, plan.kept_linears))]
    first = (
        f"{plural(len(plan.kept_linears), 'linear layer')}; embeddings, norms and what "
        f"else is not linear"
    )
    return [first, *_shortened(kinds, MOST_KEPT)]


def _kind(name: str) -> str:
    """A layer's name with `*` for its numbers: `model.layers.*.mlp.experts.*.down_proj`."""
    return NUMBER.sub("*", name)


def _findings(findings: Sequence[Finding]) -> list[str]:
    """One line a kind of layer and reason, with how many there are."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((_kind(finding.where), finding.got), []).append(finding)
    lines = [
        f"{same[0]}{f' and {count(len(same) - 1)} more like it' if len(same) > 1 else ''}"
        for same in alike.values()
    ]
    return _shortened(lines, MOST_KINDS)


def _shortened(lines: list[str], most: int) -> list[str]:
    left = len(lines) - most
    return [*lines[:most], f"and {count(left)} more kinds"] if left > 0 else lines
