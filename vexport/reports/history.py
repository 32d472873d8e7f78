"""Build the history of a model: a headline, a table ordered by time, and a chart of each task."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vexport.records import ComparedRun, History, HistoryTask, Outcome, RowHistory, TaskVerdict
from vexport.records.values import plural
from vexport.reports import document as doc
from vexport.reports.document import TableCell, facts, muted, parts, table
from vexport.reports.formatting import (
    NOT_AVAILABLE,
    Scale,
    measure_interval,
    measure_value,
    scale_of,
    size,
)

MAX_TASK_COLUMNS = 3
"""Maximum number of tasks with columns in one table. With more tasks, each task has a table."""
_MAX_TEXTS = 10
"""Maximum number of points in a chart that still shows the score next to each point."""
_DIGEST_DIGITS = 8
# Room above the highest and below the lowest value of a chart, as a share of their distance.
_ROOM = 0.12
_UNKNOWN = "unknown"
_TIME = "Time (UTC)"
_SIZE = "Size"
_READING = (
    "Regressed: the row fails, and the latest earlier row that can be compared passed. Rows can be "
    "compared if the task, its documents and prompts, the baseline, the margin and alpha are the "
    "same. An accepted baseline counts as passed. Change: the row minus its baseline on the same "
    "documents, in points or units of the metric, with the bounds that decide. If the checkpoint "
    "or the version of vLLM changed since the row before, a note shows the earlier value."
)


def history_document(history: History) -> doc.Document:
    """Return the page of a history."""
    rows = history.rows
    names = _task_names(rows)
    has_columns = len(names) <= MAX_TASK_COLUMNS
    has_runs = any(_history(row).kind == "run" for row in rows)
    has_one_baseline = bool(_common_baseline(rows))
    remarks = [
        (_row_title(row), "; ".join(texts))
        for row in rows
        if (texts := _remarks(row, has_one_baseline))
    ]
    content = parts(
        None if history.outcome else doc.Paragraph(history.headline),
        _runs_table(rows, names if has_columns else ()),
        _common(rows),
        doc.Section("Reasons and notes", (facts(*remarks),)) if remarks else None,
    )
    lead = "One row for each result, oldest first. The first row that regressed is marked."
    charts = [chart for name in names if (chart := _chart(rows, name)) is not None]
    tables = [_task_section(rows, name, number) for number, name in enumerate(names)]
    return doc.Document(
        title=f"History of {history.name}",
        status=history.outcome,
        sentence=history.headline if history.outcome else "",
        subtitle=_span(rows),
        next_step=(history.command, history.advice),
        parts=parts(
            doc.Section("Results over time", content, "history", lead),
            None if has_columns else tables,
            doc.page_section("Scores over time", "scores", _CHART_LEAD, charts) if charts else None,
            doc.Section("How to read this", (muted(_READING),)) if has_runs else None,
        ),
        wide=True,
    )


_CHART_LEAD = (
    "A bar spans the bounds that decide: a row fails if the whole bar is beyond the dashed line. "
    "An open circle is an accepted baseline. All results have the same distance on the time axis."
)


def _span(rows: Sequence[ComparedRun]) -> str:
    """Return the numbers of runs and baselines, and the first and last day."""
    kinds = [_history(row).kind for row in rows]
    runs, accepted = kinds.count("run"), kinds.count("accepted baseline")
    parts_ = [plural(runs, "run")] if runs else []
    parts_ += [plural(accepted, "accepted baseline")] if accepted else []
    days = [day for row in rows if (day := _history(row).time[:10])]
    span = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
    return ", ".join(filter(None, (*parts_, span)))


def _history(row: ComparedRun) -> RowHistory:
    assert row.history is not None
    return row.history


def _task_names(rows: Sequence[ComparedRun]) -> list[str]:
    """Return the names of all tasks, in the order of their first appearance."""
    return [*dict.fromkeys(task.name for row in rows for task in _history(row).tasks)]


def _task(row: ComparedRun, name: str) -> HistoryTask | None:
    return next((task for task in _history(row).tasks if task.name == name), None)


def _is_constant(values: Sequence[str]) -> bool:
    """Return True if all rows that have a value have the same value."""
    return len({value for value in values if value}) <= 1


@dataclass(frozen=True, slots=True)
class _Shared:
    """Property of the rows. It is a column if it varies, and otherwise a fact below the table."""

    title: str
    values: tuple[str, ...]

    @property
    def is_column(self) -> bool:
        return not _is_constant(self.values)

    @property
    def value(self) -> str:
        """Return the value of all rows, or "" if no row has a value."""
        return next(filter(None, self.values), "")


def _shared(rows: Sequence[ComparedRun]) -> tuple[_Shared, ...]:
    """Return the properties that get a column only if they vary: device, scheme and size."""
    return (
        _Shared("Device", tuple(_history(row).device for row in rows)),
        _Shared("Scheme", tuple(row.schemes for row in rows)),
        _Shared(_SIZE, tuple(size(row.num_bytes) if row.num_bytes else "" for row in rows)),
    )


def _common(rows: Sequence[ComparedRun]) -> doc.Facts | None:
    """Return the device, scheme, size and baseline that all rows have in common."""
    shared = [each for each in _shared(rows) if not each.is_column and each.value]
    if baseline := _common_baseline(rows):
        shared.append(_Shared("Baseline", (baseline,)))
    if not shared:
        return None
    return facts(*((each.title.lower(), each.value) for each in shared))


def _common_baseline(rows: Sequence[ComparedRun]) -> str:
    """Return the baseline of all rows with a verdict, or "" if the rows have different baselines.

    Two baselines with one name may have different digests.
    """
    found = {
        (history.baseline, history.baseline_digest)
        for row in rows
        if (history := _history(row)).baseline
    }
    return next(iter(found))[0] if len(found) == 1 else ""


def _runs_table(rows: Sequence[ComparedRun], names: Sequence[str]) -> doc.Table:
    """Return the table of all rows. Each task in `names` has a column."""
    varying = [each for each in _shared(rows) if each.is_column]
    tasks = [doc.Column(name, numeric=True, noted=True) for name in names]
    if not names:
        tasks = [doc.Column("Worst task", numeric=True, noted=True)]
    columns = (
        doc.Column(_TIME, nowrap=True),
        doc.Column("Run", noted=True),
        doc.Column("Checkpoint", noted=True),
        doc.Column("vLLM", nowrap=True, noted=True),
        *(
            doc.Column(each.title, numeric=each.title == _SIZE, nowrap=each.title == _SIZE)
            for each in varying
        ),
        *tasks,
        doc.Column("Verdict", nowrap=True, noted=True),
    )
    cells = [
        _row_cells(row, [each.values[number] for each in varying], names)
        for number, row in enumerate(rows)
    ]
    return table(columns, cells)


def _row_cells(
    row: ComparedRun, varying: Sequence[str], names: Sequence[str]
) -> Iterator[TableCell | str]:
    """Yield the cells of a row. `varying` are its device, scheme and size, if they are columns."""
    yield from _place_cells(row)
    for value in varying:
        yield value or NOT_AVAILABLE
    yield from _task_cells(row, names)
    yield _verdict_cell(row)


def _place_cells(row: ComparedRun) -> Iterator[TableCell]:
    """Yield the cells of the time, the run, the checkpoint and the version of vLLM."""
    history = _history(row)
    yield TableCell(_date(history), tone="regressed" if history.is_first_regression else "")
    yield TableCell(row.folder, history.setting or _kind_note(history))
    name = history.checkpoint or _UNKNOWN
    digest = history.digest[:_DIGEST_DIGITS] or "digest not recorded"
    before = history.checkpoint_before
    was = before[:_DIGEST_DIGITS] if before and history.digest else before
    yield TableCell(name, f"{digest}, was {was}" if was else digest, tone=_changed(was))
    was = history.vllm_before
    yield TableCell(history.vllm or _UNKNOWN, f"was {was}" if was else "", tone=_changed(was))


def _changed(was: str) -> str:
    return "changed" if was else ""


def _kind_note(history: RowHistory) -> str:
    return "accepted baseline" if history.kind == "accepted baseline" else ""


def _date(history: RowHistory) -> str:
    """Return the time in UTC, to the minute."""
    return history.time[:16].replace("T", " ") or _UNKNOWN


def _task_cells(row: ComparedRun, names: Sequence[str]) -> Iterator[TableCell]:
    """Yield the cell of each task, or the cell of the worst task if there are too many."""
    if names:
        for name in names:
            yield _task_cell(_task(row, name))
        return
    worst = row.worst
    task = _task(row, worst.task) if worst is not None else None
    cell = _task_cell(task)
    yield TableCell(f"{worst.task} {cell.text}" if worst is not None else cell.text, cell.note)


def _task_cell(task: HistoryTask | None) -> TableCell:
    """Return the score, with the change against the baseline and the event as the note."""
    if task is None:
        return TableCell(NOT_AVAILABLE)
    tone = "fail" if task.event in ("regressed", "fails", "still fails") else ""
    if task.limit is not None:
        limit = task.limit
        note = ", ".join(filter(None, (measure_interval(limit), task.event)))
        return TableCell(measure_value(limit, limit.value), note, tone=tone)
    verdict = task.verdict
    if verdict is None:
        return TableCell(NOT_AVAILABLE if task.value is None else _plain_score(task.value))
    scale = scale_of(verdict)
    change = f"{scale.change(verdict.difference)}, {scale.changes(verdict.low, verdict.high)}"
    note = ", ".join(filter(None, (change, task.event)))
    return TableCell(scale.value(task.value), note, tone=tone)


def _plain_score(value: float) -> str:
    """Return the score of an accepted baseline, which does not contain the metric's unit."""
    return Scale(0 <= value <= 1).value(value)


def _verdict_cell(row: ComparedRun) -> TableCell:
    """Return the outcome and the event. The first row that regressed has `first regression`."""
    history = _history(row)
    event = "first regression" if history.is_first_regression else history.event
    if row.outcome is None:
        return TableCell("not judged" if history.kind == "run" else "accepted", event)
    return TableCell(row.outcome, event, tone=row.outcome.lower(), badge=True)


def _remarks(row: ComparedRun, has_one_baseline: bool) -> list[str]:
    """Return the reason of an outcome that is not PASS, and the notes.

    The baseline is named unless all rows have the same.
    """
    reasons = [row.reason] if row.reason and row.outcome not in ("PASS", None) else []
    history = _history(row)
    if history.baseline and not has_one_baseline:
        reasons.append(f"against {history.baseline}")
    return [*reasons, *history.notes]


def _row_title(row: ComparedRun) -> str:
    history = _history(row)
    return f"{row.folder} ({history.setting})" if history.setting else row.folder


def _task_section(rows: Sequence[ComparedRun], name: str, number: int) -> doc.Section:
    """Return a section with one task's table, which has a row for each result."""
    change = doc.Column("Change", numeric=True, noted=True)
    titles = (_TIME, "Run", ">Baseline", ">Score", change, "Result")
    cells = [_task_row(row, task) for row in rows if (task := _task(row, name)) is not None]
    return doc.Section(name, (table(titles, cells),), f"task-{number}")


def _task_row(row: ComparedRun, task: HistoryTask) -> Iterator[TableCell | str]:
    yield _date(_history(row))
    yield _row_title(row)
    yield from _score_cells(task)


def _score_cells(task: HistoryTask) -> Iterator[TableCell]:
    cell = _task_cell(task)
    verdict, limit = task.verdict, task.limit
    if limit is not None:
        yield TableCell(NOT_AVAILABLE)
        yield TableCell(NOT_AVAILABLE)
        yield TableCell(measure_value(limit, limit.value), measure_interval(limit))
        yield _result_cell(limit.outcome, task)
        return
    if verdict is None:
        yield from (TableCell(NOT_AVAILABLE), TableCell(cell.text), TableCell(NOT_AVAILABLE))
        yield TableCell("accepted")
        return
    scale = scale_of(verdict)
    yield TableCell(scale.value(verdict.baseline.value))
    yield TableCell(cell.text)
    yield TableCell(scale.change(verdict.difference), scale.changes(verdict.low, verdict.high))
    yield _result_cell(verdict.outcome, task)


def _result_cell(outcome: Outcome, task: HistoryTask) -> TableCell:
    text = f"{outcome}, {task.event}" if task.event else outcome
    return TableCell(text, tone=outcome.lower(), badge=True)


def _chart(rows: Sequence[ComparedRun], name: str) -> doc.Timeline | None:
    """Return the chart of a task, or None if fewer than two rows have a value."""
    tasks = [_task(row, name) for row in rows]
    verdicts = [task.verdict for task in tasks if task is not None and task.verdict is not None]
    is_score = all(each.in_shares and each.higher_is_better for each in verdicts) and all(
        task is None or task.limit is None for task in tasks
    )
    labels = _labels(rows)
    has_texts = len(rows) <= _MAX_TEXTS
    points = tuple(
        _timed(row, task, label, is_score=is_score, has_text=has_texts)
        for row, task, label in zip(rows, tasks, labels, strict=True)
    )
    if sum(point.value is not None for point in points) < 2:
        return None
    judged = [task for task in tasks if task is not None and (task.verdict or task.limit)]
    level = _common_value([_level(task, is_score=is_score) for task in judged])
    limit = _common_value([_limit(task, is_score=is_score) for task in judged])
    ends = [end for point in points for end in (point.value, point.low, point.high)]
    values = [end for end in (*ends, level, limit) if end is not None]
    low, high = min(values), max(values)
    room = _ROOM * (high - low) or 0.01
    return doc.Timeline(
        title=name,
        unit=_unit(judged, is_score=is_score),
        points=points,
        low=low - room,
        high=high + room,
        shares=is_score or any(each.in_shares for each in verdicts),
        level=level,
        limit=limit,
    )


def _labels(rows: Sequence[ComparedRun]) -> list[str]:
    """Return the date of each row, or the time of day if all rows have the same date."""
    times = [_history(row).time for row in rows]
    if _is_constant([time[:10] for time in times]):
        return [time[11:16] for time in times]
    if _is_constant([time[:4] for time in times]):
        return [time[5:10] for time in times]
    return [time[2:10] for time in times]


def _timed(
    row: ComparedRun, task: HistoryTask | None, label: str, *, is_score: bool, has_text: bool
) -> doc.TimedPoint:
    """Return the point of a row in the chart of a task."""
    if task is None:
        return doc.TimedPoint(label=label)
    cell = _task_cell(task)
    note = f"{_row_title(row)}: {cell.text}" + (f" ({cell.note})" if cell.note else "")
    text = cell.text if has_text else ""
    marked = task.event == "regressed"
    if task.limit is not None:
        value, low, high = task.limit.value, task.limit.low, task.limit.high
        tone = task.limit.outcome.lower()
    elif task.verdict is not None:
        start = _start(task.verdict, is_score=is_score)
        value, low, high = (
            start + each for each in (task.verdict.difference, task.verdict.low, task.verdict.high)
        )
        tone = task.verdict.outcome.lower()
    else:
        accepted = task.value if is_score else 0.0
        return doc.TimedPoint(label=label, value=accepted, text=text, note=note)
    return doc.TimedPoint(
        label=label,
        value=value,
        low=low,
        high=high,
        tone=tone,
        text=text,
        note=note,
        marked=marked,
    )


def _start(verdict: TaskVerdict, *, is_score: bool) -> float:
    """Return the value to which a chart adds differences: the baseline's score, or 0."""
    return verdict.baseline.value if is_score else 0.0


def _level(task: HistoryTask, *, is_score: bool) -> float | None:
    return _start(task.verdict, is_score=is_score) if task.verdict is not None else None


def _limit(task: HistoryTask, *, is_score: bool) -> float | None:
    """Return the value at which a task begins to fail."""
    if task.limit is not None:
        return task.limit.limit
    if task.verdict is None or task.verdict.margin is None:
        return None
    return _start(task.verdict, is_score=is_score) - task.verdict.margin


def _common_value(values: Sequence[float | None]) -> float | None:
    """Return the value if all values are equal, else None."""
    if not values or None in values:
        return None
    first = values[0]
    assert first is not None
    return first if all(abs((value or 0.0) - first) < 1e-9 for value in values) else None


def _unit(tasks: Sequence[HistoryTask], *, is_score: bool) -> str:
    """Return the unit of a chart's axis."""
    if any(task.limit is not None for task in tasks):
        return "nats per token"
    if is_score:
        return "score in per cent"
    verdict = next(task.verdict for task in tasks if task.verdict is not None)
    return f"change against the baseline, {scale_of(verdict).unit}"
