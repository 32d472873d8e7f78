"""A plan for people: what is quantized how, what it will weigh, what vLLM would refuse."""

import math
import shlex
from collections import Counter
from collections.abc import Sequence

from vexport.evaluation.statistics import documents_for_power
from vexport.files import to_json
from vexport.formats.gpus import generation
from vexport.formats.schemes import get_scheme
from vexport.layers.linears import NUMBER
from vexport.plan.needs import calibration_need
from vexport.records import Finding, FusionGroup, Plan, SchemeTable
from vexport.reports import document as doc
from vexport.reports import text
from vexport.reports.document import columns, facts, row
from vexport.reports.formatting import count, percent, plural, ratio, size
from vexport.scenario import Evaluate
from vexport.scenario.evaluate import SUITES

# Lines of text; a plan as JSON has everything.
MOST_KINDS = 16
MOST_KEPT = 6
# The share of answers assumed to change, right or wrong; the line that uses it says so.
TYPICAL_DISAGREEMENT = 0.05


def render_plan(plan: Plan, format_: str, then: str, evaluate: Evaluate | None = None) -> str:
    """The plan as text or JSON (plan.schema.json), with a final newline.

    The text says how many documents the evaluation of a scenario needs, and with `then` what to type next.
    """
    return to_json(plan) if format_ == "json" else text.render([_document(plan, then, evaluate)])


def render_table(table: SchemeTable, format_: str) -> str:
    """Draw the table of schemes as text or JSON (plan-schemes.schema.json), with a final newline."""
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
        "bits: over all weights; data: calibration text; in full from: the oldest GPU whose kernels use "
        "the stored input precision; where it does not fit, the size is that with "
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


def _part(layers: int, of: int) -> str:
    return f" ({count(layers)} of {count(of)} layers fit)" if 0 < layers < of else ""


def _document(plan: Plan, then: str, evaluate: Evaluate | None) -> doc.Document:
    title = f"{plan.source}: {plan.architecture}, {count(plan.parameters)} parameters"
    attention = plural(len(plan.attention), "attention layer")
    share = ratio(plan.output_bytes, plan.source_bytes)
    bits = f"{8 * plan.output_bytes / max(plan.parameters, 1):.2f} bits over all weights"
    rows = facts(
        *(line for scheme in plan.schemes for line in _scheme_lines(plan, scheme)),
        *_labelled("stay 16 bit", _kept_lines(plan)),
        ("KV cache", f"{plan.kv_cache} in {attention}") if plan.kv_cache else None,
        ("size", f"{size(plan.source_bytes)} -> {size(plan.output_bytes)} ({share}); {bits}"),
        ("calibration", "needed" if calibration_need(plan) else "not needed"),
        ("smoothing", f"inputs, with strength {plan.smoothing:g}") if plan.smoothing else None,
        *(("note", note) for note in _findings(plan.notes)),
        *(("refused", refusal) for refusal in _findings(plan.refusals)),
        ("documents", documents_needed(evaluate))
        if evaluate and evaluate.tasks and evaluate.margin > 0
        else None,
        ("suite", suite_line(evaluate)) if evaluate and evaluate.suite else None,
        ("next", then) if not plan.refusals else None,
    )
    return doc.Document(title=plan.source, parts=(doc.Paragraph(title), rows), wide=True)


def suite_line(settings: Evaluate) -> str:
    """The documents of a suite's tasks."""
    assert settings.suite is not None
    suite, limit = SUITES[settings.suite], settings.limit or math.inf
    asked = {
        name: math.ceil(limit * documents) if limit < 1 else int(min(documents, limit))
        for name, documents in suite.tasks.items()
    }
    listed = ", ".join(f"{name} {count(number)}" for name, number in asked.items())
    documents = f"{count(sum(asked.values()))} documents for each model"
    return f"{settings.suite} ({suite.about}): {documents}: {listed}"


def documents_needed(settings: Evaluate) -> str:
    """Return how many documents pass a model that lost nothing, with power 0.8; the margin is not 0."""
    needed = documents_for_power(settings.margin, TYPICAL_DISAGREEMENT, settings.alpha)
    condition = f"margin {percent(settings.margin)}, alpha {settings.alpha:g}"
    change = percent(TYPICAL_DISAGREEMENT, 0)
    fewer = f"; limit {settings.limit:g} asks fewer" if 1 <= (settings.limit or 0) < needed else ""
    return f"about {count(needed)} a task for power 0.8 at {condition}, if {change} of answers change{fewer}"


def _labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    """A label with its first line; the others stand below it."""
    return [(label if number == 0 else "", line) for number, line in enumerate(lines)]


def _scheme_lines(plan: Plan, scheme: str) -> list[tuple[str, str]]:
    """Return how many layers a scheme quantizes, and their kinds."""
    groups = [group for group in plan.groups if group.scheme == scheme]
    layers = plural(sum(len(group.members) for group in groups), "linear layer")
    known = get_scheme(scheme)
    support = known.format.gpu_support(known.args)
    needs = f", needs the package {support.package} next to vLLM" if support.package else ""
    runs = f"{known.format.name}, loads from {generation(support.loads_from)} on{needs}"
    first = f"{layers} in {plural(len(groups), 'group')} ({runs})"
    kinds = (f"  {kind}" for kind in _shortened(_group_kinds(groups), MOST_KINDS))
    return _labelled(scheme, [first, *kinds])


def _kept_lines(plan: Plan) -> list[str]:
    """Return how many linear layers are kept, and their kinds."""
    kinds = dict.fromkeys(map(kind_of, plan.kept_linears))
    first = f"{plural(len(plan.kept_linears), 'linear layer')}; embeddings, norms and what else is not linear"
    return [first, *(f"  {kind}" for kind in _shortened([*kinds], MOST_KEPT))]


def kind_of(name: str) -> str:
    """Return a layer's name with `*` for its numbers: `model.layers.*.mlp.experts.*.down_proj`."""
    return NUMBER.sub("*", name)


def _group_kinds(groups: Sequence[FusionGroup]) -> list[str]:
    """Return how many of each kind of group there are, and what vLLM fuses in it."""
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
