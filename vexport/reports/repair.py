"""What a repair did, for people: each kind of fix with what it cost, then what cannot be repaired."""

from collections.abc import Iterator, Sequence

from vexport.errors.escaping import clip, visible
from vexport.files import to_json
from vexport.repair.changes import Repair, RepairReport, WeightChange
from vexport.reports import folding
from vexport.reports.formatting import decibels, plural
from vexport.types import Finding

# Repairs of one kind that are shown one by one; JSON has all.
SHOWN = 8
MAX_TEXT = 400


def render_repair(report: RepairReport, format_: str) -> str:
    """The report as text or JSON, with a final newline."""
    return to_json(report) if format_ == "json" else "\n".join(_lines(report)) + "\n"


def _lines(report: RepairReport) -> Iterator[str]:
    kinds: dict[tuple[str, str], list[Repair]] = {}
    for repair in report.repairs:
        kinds.setdefault((repair.family, repair.cost), []).append(repair)
    for (family, cost), repairs in kinds.items():
        yield f"{family}: {plural(len(repairs), 'fix', 'fixes')}"
        yield from (f"  {_repair(repair)}" for repair in repairs[:SHOWN])
        if len(repairs) > SHOWN:
            yield f"  and {len(repairs) - SHOWN} more: see --format json"
        yield f"  cost: {_text(cost)}{_worst(repairs)}"
        yield ""
    yield from (f"{kind.first.severity}: {_finding(kind.finding)}" for kind in folding.kinds(report.warnings))
    yield from (f"cannot be repaired: {_finding(kind.finding)}" for kind in folding.kinds(report.refusals))
    yield _conclusion(report)


def _repair(repair: Repair) -> str:
    change = f" ({_change(repair.change)})" if repair.change else ""
    return f"{_text(repair.where)}: {_text(repair.got)} -> {_text(repair.now)}{change}"


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


def _finding(finding: Finding) -> str:
    return _text(str(finding))


def _conclusion(report: RepairReport) -> str:
    done = plural(len(report.repairs), "fix", "fixes")
    if not report.ok:
        return f"{_text(report.checkpoint)}: nothing written; {plural(len(report.refusals), 'error')} left"
    if not report.repairs:
        return f"{_text(report.out)}: nothing to repair, a copy"
    return f"{_text(report.out)}: {done}; `vexport check` finds no error"


def _text(text: str) -> str:
    """Text from a checkpoint: no escape sequences, a bounded length."""
    return visible(clip(text, MAX_TEXT))
