"""What a repair did, for people: each kind of fix with what it cost, then what cannot be repaired."""

from collections.abc import Iterator, Sequence

from vexport.files import to_json
from vexport.repair.mends import Mend, RepairReport, WeightChange
from vexport.reports import folding
from vexport.reports.escaping import clip, visible
from vexport.reports.formatting import decibels, plural
from vexport.types import Finding

# Mends of one kind that are shown one by one; JSON has all.
SHOWN = 8
MAX_TEXT = 400


def render_repair(report: RepairReport, format_: str) -> str:
    """The report as text or JSON, with a final newline."""
    return to_json(report) if format_ == "json" else "\n".join(_lines(report)) + "\n"


def _lines(report: RepairReport) -> Iterator[str]:
    kinds: dict[tuple[str, str], list[Mend]] = {}
    for mend in report.mends:
        kinds.setdefault((mend.family, mend.cost), []).append(mend)
    for (family, cost), mends in kinds.items():
        yield f"{family}: {plural(len(mends), 'fix', 'fixes')}"
        yield from (f"  {_mend(mend)}" for mend in mends[:SHOWN])
        if len(mends) > SHOWN:
            yield f"  and {len(mends) - SHOWN} more: see --format json"
        yield f"  cost: {_text(cost)}{_worst(mends)}"
        yield ""
    yield from (f"{kind.first.severity}: {_finding(kind.finding)}" for kind in folding.kinds(report.warnings))
    yield from (f"cannot be repaired: {_finding(kind.finding)}" for kind in folding.kinds(report.refusals))
    yield _conclusion(report)


def _mend(mend: Mend) -> str:
    change = f" ({_change(mend.change)})" if mend.change else ""
    return f"{_text(mend.where)}: {_text(mend.got)} -> {_text(mend.now)}{change}"


def _change(change: WeightChange) -> str:
    parts = []
    if change.relative is not None and change.snr_db is not None:
        parts.append(f"weight moved by {change.relative:.2%}, {decibels(change.snr_db)} dB")
    if change.source_snr_db is not None:
        before, after = change.source_snr_db
        old = "unreadable" if before is None else f"{decibels(before)} dB"
        parts.append(f"against the source {old} -> {decibels(after)} dB")
    return "; ".join(parts) or "not comparable"


def _worst(mends: Sequence[Mend]) -> str:
    moved = [mend.change.relative for mend in mends if mend.change and mend.change.relative is not None]
    return f"; {plural(len(moved), 'weight')} moved, by {max(moved):.2%} at most" if moved else ""


def _finding(finding: Finding) -> str:
    return _text(str(finding))


def _conclusion(report: RepairReport) -> str:
    done = plural(len(report.mends), "fix", "fixes")
    if not report.ok:
        return f"{_text(report.checkpoint)}: nothing written; {plural(len(report.refusals), 'error')} left"
    if not report.mends:
        return f"{_text(report.out)}: nothing to repair, a copy"
    return f"{_text(report.out)}: {done}; `vexport check` finds no error"


def _text(text: str) -> str:
    """Text from a checkpoint: no escape sequences, a bounded length."""
    return visible(clip(text, MAX_TEXT))
