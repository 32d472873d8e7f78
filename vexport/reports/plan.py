"""Render a plan: layers by scheme, predicted size, and layers that vLLM would refuse."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

from vexport.architectures import NUMBER
from vexport.files import to_json
from vexport.formats.gpus import generation
from vexport.formats.plan import FusionGroup, Plan
from vexport.formats.schemes import Scheme, get_scheme
from vexport.plan.recommend import recommended_generations, schemes_on
from vexport.plan.rules import calibration_need, text_use
from vexport.records import Finding, GpuOutlook, SchemeOnGpu, SchemeOutlook, SchemeTable
from vexport.records.margin import margin_of_shares
from vexport.records.scale import percent
from vexport.reports import document as doc
from vexport.reports.document import facts, mono, table
from vexport.reports.formatting import count, ratio, size
from vexport.reports.renderers import text
from vexport.scenario import Calibration, Evaluate
from vexport.scenario.evaluate import SUITES, TYPICAL_DISAGREEMENT
from vexport.words import plural

# Maximum lines for kinds of layers, and for kept layers. JSON has everything.
MOST_KINDS = 16
MOST_KEPT = 6


def render_plan(
    plan: Plan,
    format_: str,
    next_command: str,
    width: int = text.WIDTH,
    evaluate: Evaluate | None = None,
    documents: int | None = None,
    *,
    sm: int | None = None,
    calibration: Calibration | None = None,
    duration: str | None = None,
    every: bool = False,
) -> str:
    """Return the plan as text or JSON (plan.schema.json), with a final newline.

    The text includes the number of `documents` that a scenario's evaluation needs, and the next
    command. With `sm`, it also shows how GPUs of this compute capability run the schemes.
    `calibration` is the text that the user named. `duration` is a line with the time of the
    calibration, if it is long. With `every`, no kind of layer is left out.
    """
    if format_ == "json":
        return to_json(plan)
    most_kinds, most_kept = (math.inf, math.inf) if every else (MOST_KINDS, MOST_KEPT)
    attention = plural(len(plan.attention), "attention layer")
    share = ratio(plan.output_bytes, plan.source_bytes)
    bits = f"{8 * plan.output_bytes / max(plan.parameters, 1):.2f} bits over all weights"
    rows = facts(
        *(
            line
            for scheme in plan.used_schemes
            for line in _labelled(scheme.name, _scheme_lines(plan, scheme, most_kinds))
        ),
        *_labelled("in 16 bit", _kept_lines(plan, most_kept)),
        ("KV cache", f"{plan.kv_cache} in {attention}") if plan.kv_cache else None,
        ("runs", _runs_on(plan, sm)) if sm is not None else None,
        *(("fault", str(fault)) for fault in plan.faults),
        ("size", f"{size(plan.source_bytes)} -> {size(plan.output_bytes)} ({share}); {bits}"),
        ("calibration", _calibration_line(plan, calibration)),
        ("time", duration) if duration else None,
        ("smoothing", f"inputs, with strength {plan.smoothing:g}") if plan.smoothing else None,
        *(("note", note) for note in _findings(plan.notes, most_kinds)),
        *(("refused", refusal) for refusal in _findings(plan.refusals, most_kinds)),
        ("documents", _documents_line(evaluate, documents)) if evaluate and documents else None,
        ("suite", _suite_line(evaluate, evaluate.suite)) if evaluate and evaluate.suite else None,
        ("next", mono(next_command)) if not plan.refusals else None,
    )
    title = doc.Paragraph(
        f"{plan.source}: {plan.architecture}, {count(plan.parameters)} parameters"
    )
    return text.render([doc.Document(title=plan.source, parts=(title, rows))], width)


def _calibration_line(plan: Plan, calibration: Calibration | None) -> str:
    """Return the name and size of the calibration text, or whether text is needed or would help."""
    needed = calibration_need(plan) is not None
    if calibration is None or not needed:
        use = text_use(plan.used_schemes, needed=needed)
        return "helps: add --calibration DATA" if use == "helps" else use
    size_of_text = f"{count(calibration.samples)} samples of {count(calibration.seq_len)} tokens"
    answers = ", answers only" if calibration.calibrate_on else ""
    return f"{', '.join(calibration.names)}, at most {size_of_text}{answers}"


def _runs_on(plan: Plan, sm: int) -> str:
    lines = (f"{name} {runs_text(on_gpu)}" for name, on_gpu in schemes_on(plan.schemes, sm))
    return f"on {generation(sm)}: {', '.join(lines)}"


def render_table(
    schemes: SchemeTable, format_: str, width: int = text.WIDTH, *, every: bool = True
) -> str:
    """Return the table of schemes as text or JSON, with a final newline.

    The schema of the JSON is plan-schemes.schema.json. Unless `every` is True, a table for a GPU
    has only the schemes that fit and run there, and another table the schemes to start with.
    """
    if format_ == "json":
        return to_json(schemes)
    title = (
        f"{schemes.source}: {schemes.architecture}, {count(schemes.parameters)} parameters, "
        f"{size(schemes.source_bytes)}, {plural(schemes.layers, 'linear layer')}"
    )
    content = (
        doc.Paragraph(title),
        *(
            _schemes_on_gpu(schemes, schemes.gpu, every=every)
            if schemes.gpu
            else _schemes_on_all_gpus(schemes, every=every)
        ),
        facts(*(("next", mono(call)) for call in _next_plans(schemes))),
    )
    return text.render([doc.Document(title=schemes.source, parts=content)], width)


def _next_plans(schemes: SchemeTable) -> Iterator[str]:
    recommended = schemes.gpu.recommended if schemes.gpu else ()
    for name in [each.scheme for each in recommended] or ["SCHEME"]:
        yield f"vexport plan {shlex.quote(schemes.source)} --scheme {name}"


def _schemes_on_all_gpus(schemes: SchemeTable, *, every: bool) -> Iterator[doc.Part]:
    best = recommended_generations(schemes)
    if best and not every:
        by_name = {each.scheme: each for each in schemes.schemes}
        brief = (
            (*_outlook(by_name[name]), ", ".join(generations)) for name, generations in best.items()
        )
        yield table(("scheme", ">size", ">bits", "text", "best on"), brief)
        yield facts(
            _LEGEND["bits"],
            _LEGEND["text"],
            ("best on", "generations of GPUs on which to start with this scheme"),
            _not_shown(len(schemes.schemes) - len(best), "for other purposes"),
            ("one GPU", mono(f"vexport plan {shlex.quote(schemes.source)} --gpu NAME")),
        )
        return
    rows = (
        (
            *_outlook(scheme),
            scheme.generation,
            "no GPU" if scheme.full_sm is None else generation(scheme.full_sm),
            _fit(scheme, schemes),
        )
        for scheme in schemes.schemes
    )
    yield table(("scheme", ">size", ">bits", "text", "loads from", "native from", "shapes"), rows)
    yield facts(
        _LEGEND["bits"],
        _LEGEND["text"],
        ("native from", "the oldest GPU whose kernels multiply inputs in the stored precision"),
        _LEGEND["shapes"],
    )


def _schemes_on_gpu(schemes: SchemeTable, gpu: GpuOutlook, *, every: bool) -> Iterator[doc.Part]:
    where = generation(gpu.sm)
    if gpu.usable_bytes is not None:
        where = f"{gpu.name}, {where}, {size(gpu.usable_bytes)} for vLLM"
    text_of = {each.scheme: _text_use(each) for each in schemes.schemes}
    yield facts(
        ("GPU", where),
        *(
            (
                f"for {each.bits} bits",
                f"{each.scheme}: {each.reason}; calibration text {text_of[each.scheme]}",
            )
            for each in gpu.recommended
        ),
        None if gpu.recommended else ("recommended", "no scheme fits and runs natively"),
    )
    shown = [each for each in schemes.schemes if every or (each.fits and each.runs_on_gpu)]
    columns = ["scheme", ">size", ">bits", "text", "runs", "shapes"]
    rows = [
        [
            *_outlook(scheme),
            runs_text(scheme.on_gpu) if scheme.on_gpu else "",
            _fit(scheme, schemes),
        ]
        for scheme in shown
    ]
    if gpu.usable_bytes is not None:
        columns.append(">memory")
        for cells, scheme in zip(rows, shown, strict=True):
            cells.append(_memory_share(scheme, gpu.usable_bytes))
    yield table(columns, rows)
    if faults := [("fault", str(fault)) for scheme in shown for fault in scheme.faults]:
        yield facts(*faults)
    hidden = len(schemes.schemes) - len(shown)
    yield facts(
        _LEGEND["bits"],
        _LEGEND["text"],
        ("native", "the GPU computes with the scheme's number of bits for inputs (W4A16: 16)"),
        ("inputs in N bits", "the GPU computes with N bits for inputs, instead of the scheme's"),
        ("memory", "share of one GPU's memory that the weights take, or how many GPUs they need"),
        _LEGEND["shapes"],
        _not_shown(hidden, "that this GPU or model cannot use"),
    )


_LEGEND = {
    "bits": ("bits", "per weight, over all weights"),
    "text": ("text", "calibration text, which makes the scheme more accurate if it helps"),
    "shapes": (
        "shapes",
        "whether vLLM runs all layers; if not, the size is for --on-unsupported-shape keep",
    ),
}


def _not_shown(number: int, what: str) -> tuple[str, str] | None:
    return ("not shown", f"{plural(number, 'scheme')} {what}: add --all") if number else None


def _outlook(scheme: SchemeOutlook) -> tuple[str, str, str, str]:
    """Return the first cells of a row: name, size, bits per weight, and use of text."""
    bits = f"{scheme.bits:.2f}"
    return scheme.scheme, size(scheme.output_bytes), bits, _text_use(scheme)


def _text_use(scheme: SchemeOutlook) -> str:
    """Return whether calibration text is needed or helps for a scheme (see `text_use`)."""
    return text_use([get_scheme(scheme.scheme)], needed=scheme.needs_calibration)


def runs_text(on_gpu: SchemeOnGpu) -> str:
    """Return how a GPU runs a scheme, in words."""
    if on_gpu.input_bits is None:
        return "not in vLLM"
    if on_gpu.native:
        return "native"
    return f"inputs in {on_gpu.input_bits} bits"


def _memory_share(scheme: SchemeOutlook, usable_bytes: int) -> str:
    """Return the share of one GPU's memory that the weights take, or how many GPUs they need."""
    if scheme.output_bytes > usable_bytes:
        return f"{math.ceil(scheme.output_bytes / usable_bytes)} GPUs"
    if 100 * scheme.output_bytes < usable_bytes:
        return "<1%"
    return ratio(scheme.output_bytes, usable_bytes)


def _fit(scheme: SchemeOutlook, schemes: SchemeTable) -> str:
    return "yes" if scheme.fits else f"no: {scheme.reason}{_part(scheme.layers, schemes.layers)}"


def _part(layers: int, of: int) -> str:
    return f" ({count(layers)} of {count(of)} layers fit)" if 0 < layers < of else ""


def _suite_line(settings: Evaluate, name: str) -> str:
    """Return a line with the number of documents of each task of a suite."""
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
    """Return a line with the number of documents that an evaluation needs.

    With `needed` documents, a model without any loss passes with power 0.8.
    """
    margin = margin_of_shares(settings.margin)
    condition = f"margin {percent(margin)}, alpha {settings.alpha:g}"
    change = percent(TYPICAL_DISAGREEMENT, 0)
    fewer = f"; limit {settings.limit:g} uses fewer" if 1 <= (settings.limit or 0) < needed else ""
    return (
        f"about {count(needed)} a task for power 0.8 at {condition}, if {change} of responses "
        f"change{fewer}"
    )


def _labelled(label: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield a label with its first line, then the other lines, indented."""
    yield label, lines[0]
    yield from (("", f"  {line}") for line in lines[1:])


def _scheme_lines(plan: Plan, scheme: Scheme, most: float) -> list[str]:
    groups = [group for group in plan.groups if group.scheme == scheme]
    layers = plural(sum(len(group.members) for group in groups), "linear layer")
    support = scheme.format.gpu_support(scheme.args)
    runs = f"{scheme.format.name}, loads from {generation(support.loads_from)} on"
    counts = Counter(map(_group_kind, groups))
    kinds = [f"{count(number)} x {kind}" for kind, number in counts.items()]
    return [f"{layers} in {plural(len(groups), 'group')} ({runs})", *_shortened(kinds, most)]


def _group_kind(group: FusionGroup) -> str:
    leaves = [member.name.rpartition(".")[2] for member in group.members]
    return _kind(group.name) + (f" = {' + '.join(leaves)}" if len(leaves) > 1 else "")


def _kept_lines(plan: Plan, most: float) -> list[str]:
    kinds = [*dict.fromkeys(map(_kind, plan.kept_linears))]
    layers = plural(len(plan.kept_linears), "linear layer")
    first = f"{layers}, embeddings, norms and other modules that are not linear"
    return [first, *_shortened(kinds, most)]


def _kind(name: str) -> str:
    """Return a layer's name with `*` for its numbers: `model.layers.*.mlp.experts.*.down_proj`."""
    return NUMBER.sub("*", name)


def _findings(findings: Sequence[Finding], most: float) -> list[str]:
    """Return one line for each kind of layer and reason, with the number of findings."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((_kind(finding.where), finding.got), []).append(finding)
    lines = [
        f"{same[0]}{f' and {count(len(same) - 1)} more like it' if len(same) > 1 else ''}"
        for same in alike.values()
    ]
    return _shortened(lines, most)


def _shortened(lines: list[str], most: float) -> list[str]:
    if len(lines) <= most:
        return lines
    left = len(lines) - int(most)
    return [*lines[: int(most)], f"and {count(left)} more kinds: add --all"]
