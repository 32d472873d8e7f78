"""Several runs in one table, of which the smallest that passes is marked."""

from collections.abc import Sequence
from dataclasses import replace

from vexport.records import ComparedRun, Report, TaskVerdict, Verdict
from vexport.reports import document as doc
from vexport.reports.document import Column, TableCell, columns, facts, muted, row
from vexport.reports.formatting import NOT_AVAILABLE, plural, size, small
from vexport.reports.sentences import scale_of, schemes_in_use

_COLUMNS = (
    *columns("run", "scheme", ">size", ">bits", ">KL", "worst task"),
    Column("change", numeric=True, noted=True),
    Column("result", nowrap=True),
)
_LEGEND = (
    "KL: nats a token from the baseline. Worst task: the one with the lowest bound, its change in points or "
    "units of the metric. *: the smallest that passes."
)


def compared_run(report: Report, folder: str) -> ComparedRun:
    """The row of a finished run."""
    plan = report.plan
    return ComparedRun(
        name=report.name,
        folder=folder,
        schemes=schemes_in_use(plan),
        outcome=report.outcome,
        reason=report.reason,
        num_bytes=plan.output_bytes,
        bits_per_weight=8 * plan.output_bytes / max(1, plan.parameters),
        mean_kl=report.drift.mean_kl if report.drift else None,
        worst=worst_task(report.verdict) if report.verdict else None,
    )


def worst_task(verdict: Verdict) -> TaskVerdict | None:
    """The task with the lowest bound, without its documents."""
    worst = min(verdict.tasks, key=lambda task: task.low, default=None)
    return replace(worst, flips=(), also=()) if worst else None


def marked(runs: Sequence[ComparedRun]) -> tuple[ComparedRun, ...]:
    """The runs with the smallest that passes marked, of equal ones the nearest to the baseline."""
    passed = [run for run in runs if run.outcome == "PASS"]
    best = min(passed, key=lambda run: (run.num_bytes, run.mean_kl or 0.0), default=None)
    return tuple(replace(run, smallest=run is best) for run in runs)


def comparison_document(runs: Sequence[ComparedRun]) -> doc.Document:
    """The table, and why a run did not pass."""
    best = next((run for run in runs if run.smallest), None)
    answer = f"{best.folder} is the smallest that passes" if best else "none passes"
    whys = [(run.folder, run.reason) for run in runs if run.outcome != "PASS"]
    table = doc.Table(_COLUMNS, tuple(map(_cells, runs)))
    parts = doc.parts(doc.Paragraph(answer), table, muted(_LEGEND), facts(*whys) if whys else None)
    return doc.Document(title=plural(len(runs), "run"), parts=(doc.Section("Runs", parts),), wide=True)


def _cells(run: ComparedRun) -> tuple[TableCell, ...]:
    return row(
        f"{run.folder} *" if run.smallest else run.folder,
        run.schemes or NOT_AVAILABLE,
        size(run.num_bytes) if run.num_bytes else NOT_AVAILABLE,
        f"{run.bits_per_weight:.2f}" if run.bits_per_weight else NOT_AVAILABLE,
        NOT_AVAILABLE if run.mean_kl is None else small(run.mean_kl),
        run.worst.task if run.worst else NOT_AVAILABLE,
        _change(run),
        doc.badge(run.outcome) if run.outcome else "not made",
    )


def _change(run: ComparedRun) -> TableCell:
    if run.worst is None:
        return TableCell(NOT_AVAILABLE)
    scale, task = scale_of(run.worst), run.worst
    return TableCell(scale.change(task.difference), scale.changes(task.low, task.high))
