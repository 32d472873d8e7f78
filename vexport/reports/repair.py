"""What a repair did, for people: each kind of fix with what it cost, then what cannot be repaired."""

from collections.abc import Sequence

from vexport.files import to_json
from vexport.repair.changes import Repair, RepairReport, WeightChange
from vexport.reports import document as doc
from vexport.reports import text
from vexport.reports.document import listing, parts
from vexport.reports.formatting import decibels, plural
from vexport.types import Finding

# Repairs of one kind that are shown one by one; JSON has all.
SHOWN = 8


def render_repair(report: RepairReport, format_: str) -> str:
    """The report as text or JSON, with a final newline."""
    return to_json(report) if format_ == "json" else text.render([_document(report)])


def _document(report: RepairReport) -> doc.Document:
    kinds: dict[tuple[str, str], list[Repair]] = {}
    for repair in report.repairs:
        kinds.setdefault((repair.family, repair.cost), []).append(repair)
    content = parts(
        [_kind(family, cost, repairs) for (family, cost), repairs in kinds.items()],
        _findings("Warnings", report.warnings),
        _findings("Cannot be repaired", report.refusals),
        doc.Paragraph(_conclusion(report)),
    )
    return doc.Document(title=report.checkpoint, parts=content, wide=True)


def _kind(family: str, cost: str, repairs: Sequence[Repair]) -> doc.Section:
    """The repairs of one kind, and what the worst of them cost."""
    lines = listing([_repair(repair) for repair in repairs], SHOWN)
    total = doc.Paragraph(f"cost: {cost}{_worst(repairs)}")
    return doc.Section(f"{family}: {plural(len(repairs), 'fix', 'fixes')}", (lines, total))


def _findings(title: str, findings: Sequence[Finding]) -> doc.Section | None:
    rows = tuple((title, finding) for finding in findings)
    return doc.Section(title, (doc.FindingList(rows, "--format json"),)) if rows else None


def _repair(repair: Repair) -> str:
    change = f" ({_change(repair.change)})" if repair.change else ""
    return f"{repair.where}: {repair.got} -> {repair.now}{change}"


def _change(change: WeightChange) -> str:
    parts = []
    if change.relative is not None and change.snr_db is not None:
        parts.append(f"weight moved by {change.relative:.2%}, {decibels(change.snr_db)} dB")
    if change.source_snr_db is not None:
        before, after = change.source_snr_db
        old = "unreadable" if before is None else f"{decibels(before)} dB"
        parts.append(f"against the source {old} -> {decibels(after)} dB")
    return "; ".join(parts) or "not comparable"


def _worst(repairs: Sequence[Repair]) -> str:
    moved = [
        repair.change.relative for repair in repairs if repair.change and repair.change.relative is not None
    ]
    return f"; {plural(len(moved), 'weight')} moved, by {max(moved):.2%} at most" if moved else ""


def _conclusion(report: RepairReport) -> str:
    if not report.ok:
        return f"{report.checkpoint}: nothing written; {plural(len(report.refusals), 'error')} left"
    if not report.repairs:
        return f"{report.out}: nothing to repair, a copy"
    return f"{report.out}: {plural(len(report.repairs), 'fix', 'fixes')}; `vexport check` finds no error"
