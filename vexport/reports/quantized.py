"""Render the results of `quantize` and `repair`, with the next commands."""

from collections.abc import Sequence

from vexport.files import to_json
from vexport.numerics.metrics import decibels
from vexport.records import Finding, Quantized, Repair, RepairReport, WeightChange
from vexport.reports import document as doc
from vexport.reports.document import facts, mono, parts, row
from vexport.reports.formatting import count, coverage_lines, ratio, size
from vexport.reports.layers import rounding_lines
from vexport.reports.renderers import text
from vexport.words import plural

# Maximum number of repairs listed for each kind. JSON has all.
MAX_SHOWN = 8


def render_quantized(answer: Quantized, format_: str, width: int = text.WIDTH) -> str:
    """Return the result as text or JSON (quantize.schema.json), with a final newline."""
    if format_ == "json":
        return to_json(answer)
    share = ratio(answer.quantized_parameters, answer.parameters)
    schemes = ", ".join(answer.schemes) or "nothing quantized"
    layers = f"{count(answer.layers)} of {count(answer.of_layers)} linear layers"
    change = f"{size(answer.source_bytes)} -> {size(answer.output_bytes)}"
    of_source = ratio(answer.output_bytes, answer.source_bytes)
    text_digest = (answer.calibration_digest or "")[:16]
    samples = f"{plural(answer.calibration_rows, 'sample')} of {answer.calibration_data or 'text'}"
    rows = facts(
        ("size", f"{change} ({of_source}), {answer.bits:.2f} bits per weight"),
        ("calibrated", f"{samples}, sha256 {text_digest}") if answer.calibration_digest else None,
        ("smoothed", _smoothing_text(answer)) if answer.smoothing else None,
        *(("experts", line) for line in coverage_lines(answer.experts)),
        *(("rounding", line) for line in rounding_lines(answer.rounding)),
        *(("next", mono(command)) for command in answer.next_commands),
    )
    title = doc.Paragraph(f"{answer.checkpoint}: {schemes}: {layers}, {share} of the weights")
    return text.render([doc.Document(title=answer.checkpoint, parts=(title, rows))], width)


def _smoothing_text(answer: Quantized) -> str:
    """Return the strength of the smoothing, and the number of tensors that it changed."""
    if not answer.smoothed_tensors:
        return "nothing: no channels of this model can be scaled without changing its output"
    return f"{plural(answer.smoothed_tensors, 'tensor')}, with strength {answer.smoothing:g}"


def render_repair(report: RepairReport, format_: str) -> str:
    """Return the report as text or JSON, with a final newline."""
    if format_ == "json":
        return to_json(report)
    kinds: dict[tuple[str, str, str | None], list[Repair]] = {}
    for repair in report.repairs:
        kinds.setdefault((repair.family, repair.cost, repair.assumption), []).append(repair)
    content = parts(
        [_kind(*kind, repairs) for kind, repairs in kinds.items()],
        _findings("Remaining findings", report.warnings) if report.warnings else None,
        _findings("Cannot be repaired", report.refusals) if report.refusals else None,
        doc.Paragraph(_conclusion(report)),
    )
    return text.render([doc.Document(title=report.checkpoint, parts=content, wide=True)])


def _kind(family: str, cost: str, assumption: str | None, repairs: Sequence[Repair]) -> doc.Section:
    """Return a section on repairs of one kind: each repair, the cost, and the assumption."""
    lines = [
        f"{each.where}: {each.got} -> {each.now}{_change(each.change)}"
        for each in repairs[:MAX_SHOWN]
    ]
    if len(repairs) > MAX_SHOWN:
        lines.append(f"and {len(repairs) - MAX_SHOWN} more: see --format json")
    changes = [each.change for each in repairs if each.change is not None]
    moved = [
        each.relative
        for each in changes
        if each.relative is not None and each.source_snr_db is None
    ]
    worst = f"; {plural(len(moved), 'weight')} moved, by {max(moved):.2%} at most" if moved else ""
    title = f"{family}: {plural(len(repairs), 'fix', 'fixes')}"
    paragraphs = [doc.Paragraph(f"cost: {cost}{worst}")]
    if assumption is not None:
        paragraphs.append(
            doc.Paragraph(f"assumes that {assumption}; the checkpoint does not confirm this")
        )
    return doc.Section(title, (doc.Listing(row(*lines)), *paragraphs))


def _findings(title: str, findings: Sequence[Finding]) -> doc.Section:
    return doc.Section(
        title, (doc.FindingList(tuple((title, each) for each in findings), "--format json"),)
    )


def _change(change: WeightChange | None) -> str:
    """Return the weight's distance from the source before and after the repair, in dB.

    Without a source, return the distance between the stored and the repaired weight.
    """
    if change is None:
        return ""
    if change.source_snr_db is not None:
        before, after = change.source_snr_db
        old = "unreadable" if before is None else decibels(before, " dB")
        return f" (against the source {old} -> {decibels(after, ' dB')})"
    if change.relative is not None and change.snr_db is not None:
        distance = f"{change.relative:.2%}, {decibels(change.snr_db, ' dB')}"
        return f" (moved from the stored weight by {distance})"
    return " (not comparable)"


def _conclusion(report: RepairReport) -> str:
    if not report.ok:
        return f"{report.checkpoint}: nothing written; {plural(len(report.refusals), 'error')} left"
    compared = "" if report.source is None else f"; compared with {report.source}"
    if not report.repairs:
        return f"{report.out}: nothing to repair, wrote a copy{compared}"
    fixes = f"{report.out}: {plural(len(report.repairs), 'fix', 'fixes')}"
    if report.source is None:
        return (
            f"{fixes}; `vexport check` finds no error, but values were not compared "
            "(--source SOURCE compares them)"
        )
    return f"{fixes}; `vexport check --source` finds no error{compared}"
