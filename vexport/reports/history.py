"""Build the history of a model: a table ordered by time, and a table of all tasks."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from vexport.records import History, HistoryRow, HistoryTask
from vexport.records.scale import NOT_AVAILABLE, percent
from vexport.reports import document as doc
from vexport.reports.document import TableCell, badge, facts, judged_cell, muted, parts, table
from vexport.words import plural

_DIGEST_DIGITS = 8
_UNKNOWN = "unknown"
_TIME = "Time (UTC)"
_LEAD = "One row for each side and setting of a run, oldest first."
_READING = (
    "First regression: the row fails, and the latest earlier row of the same side and setting "
    "passed. Rows are compared if the task's metric, prompts, generation arguments and number of "
    "documents, the baseline, the margin and alpha are the same. An accepted baseline counts as "
    "passed. Change: the row minus its baseline on the same documents, in points or units of the "
    "metric, with the bounds that decide. Changed: values that differ from the row before of the "
    "same side and setting."
)


def history_document(history: History) -> doc.Document:
    """Return the page of a history."""
    rows = history.rows
    columns = (
        doc.Column(_TIME, nowrap=True),
        doc.Column("Run", noted=True),
        doc.Column("Checkpoint", noted=True),
        doc.Column("vLLM", nowrap=True),
        doc.Column("Worst task", noted=True),
        doc.Column("Verdict", noted=True),
        doc.Column("Event", nowrap=True),
        "Changed",
    )
    reasons = [(row.title, row.reason) for row in rows if row.reason and row.outcome != "PASS"]
    content = parts(
        table(columns, map(_cells, rows)),
        doc.Section("Reasons", (facts(*reasons),)) if reasons else None,
    )
    decisive = history.decisive
    return doc.Document(
        title=f"History of {history.name}",
        status=history.outcome,
        sentence=f"{decisive.title}: {decisive.reason}" if decisive is not None else "",
        subtitle=_span(rows),
        parts=parts(
            doc.Section("Results over time", content, "history", _LEAD),
            _tasks_section(rows),
            doc.Section("How to read this", (muted(_READING),)),
        ),
        wide=True,
    )


def _span(rows: Sequence[HistoryRow]) -> str:
    """Return the numbers of rows and baselines, and the first and last day."""
    kinds = [row.kind for row in rows]
    counts = [
        plural(kinds.count(kind), noun)
        for kind, noun in (("run", "result"), ("accepted baseline", "accepted baseline"))
        if kind in kinds
    ]
    days = [row.time[:10] for row in rows if row.time]
    span = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
    return ", ".join(filter(None, (*counts, span)))


def _cells(row: HistoryRow) -> Iterator[TableCell | str]:
    is_regression = row.event == "first regression"
    yield TableCell(_time(row), tone="regressed" if is_regression else "")
    yield TableCell(row.folder, row.setting or ("" if row.kind == "run" else row.kind))
    digest = row.digest[:_DIGEST_DIGITS] or "digest not recorded"
    yield TableCell(row.checkpoint or _UNKNOWN, digest)
    yield row.vllm or _UNKNOWN
    yield _worst_cell(row)
    yield _verdict_cell(row)
    yield row.event
    yield ", ".join(f"{change.name} (was {change.was})" for change in row.changes)


def _time(row: HistoryRow) -> str:
    """Return the time in UTC, to the minute."""
    return row.time[:16].replace("T", " ") or _UNKNOWN


def _worst_cell(row: HistoryRow) -> TableCell:
    if not row.tasks:
        return TableCell(NOT_AVAILABLE)
    task = min(row.tasks, key=_room)
    score, change = _score(task), _change(task)
    return TableCell(f"{task.name} {score.text}", change.text and f"{change.text}, {change.note}")


def _room(task: HistoryTask) -> float:
    """Return how far the bound of a task is from its limit, as a share of the limit."""
    if (limit := task.limit) is not None:
        return -(limit.value if limit.high is None else limit.high) / (limit.limit or 1.0)
    return task.verdict.share_of_margin(task.verdict.low) if task.verdict is not None else 0.0


def _score(task: HistoryTask) -> TableCell:
    if task.limit is not None:
        return judged_cell(task.limit)
    if task.value is None:
        return TableCell(NOT_AVAILABLE)
    # An accepted baseline does not contain the unit of its metric.
    if task.verdict is None:
        return TableCell(percent(task.value) if 0 <= task.value <= 1 else f"{task.value:.4g}")
    return TableCell(task.verdict.scale.value(task.value))


def _change(task: HistoryTask) -> TableCell:
    return judged_cell(task.verdict) if task.verdict is not None else TableCell("")


def _verdict_cell(row: HistoryRow) -> TableCell:
    against = f"against {row.baseline}" if row.baseline and row.tasks else ""
    if row.outcome is None:
        return TableCell("not judged" if row.kind == "run" else "accepted", against)
    return replace(badge(row.outcome), note=against)


def _tasks_section(rows: Sequence[HistoryRow]) -> doc.Section | None:
    """Return the table of all tasks over time, or None if there is at most one task."""
    names = [*dict.fromkeys(task.name for row in rows for task in row.tasks)]
    if len(names) <= 1:
        return None
    change = doc.Column("Change", numeric=True, noted=True)
    score = doc.Column("Score", numeric=True, noted=True)
    columns = ("Task", doc.Column(_TIME, nowrap=True), "Run", score, change, "Result", "Event")
    cells = [
        _task_cells(row, task)
        for name in names
        for row in rows
        for task in row.tasks
        if task.name == name
    ]
    return doc.Section("Tasks over time", (table(columns, cells),), "tasks")


def _task_cells(row: HistoryRow, task: HistoryTask) -> Iterator[TableCell | str]:
    yield task.name
    yield _time(row)
    yield row.title
    yield _score(task)
    yield _change(task)
    yield badge(task.outcome) if task.outcome is not None else "not judged"
    yield task.event
