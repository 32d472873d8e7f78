"""Several runs next to each other, the oldest first: scores, changes, size, speed, what each scheme loses."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vexport.evaluation.scheme_points import scheme_points
from vexport.reports.charts.plane import Plane, scheme_chart
from vexport.reports.charts.trend import Trend, trend
from vexport.reports.document import (
    SUMMARY,
    Cell,
    Column,
    Document,
    Section,
    Table,
    badge,
    columns,
    parts,
    row,
)
from vexport.reports.formatting import NOT_AVAILABLE, bits_per_weight, count, duration, size, small
from vexport.reports.sentences import (
    outcome_line,
    report_device,
    scale_of,
    schemes_in_use,
    task_title,
)
from vexport.reports.speed import most_at_once, points_of, rate, spread
from vexport.types import Outcome, Report, SpeedPoint, TaskVerdict

_COLUMNS = (
    Column("Run"),
    Column("Made (UTC)", nowrap=True),
    *columns("Result", "Since the run before", "Schemes"),
    *(Column(title, nowrap=True) for title in ("Size", "Bits", "Tokens/s", "Time", "KL")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: what it is called here, as no other of its history, and where its page lies.

    `href` is relative to the page of the history, empty where the run has no page.
    """

    report: Report
    folder: str = ""
    href: str = ""
    label: str = ""


def by_time(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs by the time of their report, whatever the order in which they were named, with labels."""
    return _labelled(sorted(runs, key=lambda run: run.report.created))


def history_document(runs: Sequence[Run]) -> Document:
    """The runs, the scores of each task, KL against bits, and trends."""
    ordered = by_time(runs)
    titles = tuple(dict.fromkeys(task_title(task) for run in ordered for task in _tasks(run)))
    kl_chart = scheme_chart(scheme_points([replace(run.report, name=run.label) for run in ordered]))
    trends = _trends(ordered, titles)
    first, last = (_made(run.report.created) for run in (ordered[0], ordered[-1]))
    return Document(
        title=f"{len(ordered)} runs",
        subtitle=f"{first} to {last} UTC",
        parts=parts(
            Section("Runs, the oldest first", (_runs_table(ordered),), anchor="runs"),
            _scores_section(ordered, titles) if titles else None,
            Section("What each scheme loses", (kl_chart,)) if kl_chart else None,
            Section("Over time", trends) if trends else None,
        ),
    )


def _labelled(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs by name; those that share one with their folder too, or when they were made."""
    labels = [run.report.name for run in runs]
    for more in (lambda run: run.folder, lambda run: _made(run.report.created)):
        counts = Counter(labels)
        labels = [
            f"{label} ({more(run)})" if counts[label] > 1 and more(run) else label
            for label, run in zip(labels, runs, strict=True)
        ]
    return tuple(replace(run, label=label) for run, label in zip(runs, labels, strict=True))


def _runs_table(runs: Sequence[Run]) -> Table:
    changes = ["first run", *map(_worst_change, runs, runs[1:])]
    rows = tuple(
        _run_row(number, run, change)
        for number, (run, change) in enumerate(zip(runs, changes, strict=True), 1)
    )
    return Table(_COLUMNS, rows)


def _run_row(number: int, run: Run, change: str) -> tuple[Cell, ...]:
    report = run.report
    return row(
        Cell(f"{number} {run.label}", href=run.href),
        _made(report.created),
        badge(outcome_line(report.outcome, report_device(report))),
        change,
        schemes_in_use(report.plan),
        size(report.plan.output_bytes),
        bits_per_weight(report.plan.output_bytes, report.plan.parameters),
        _speed_cell(report),
        duration(sum(report.seconds.values())),
        small(report.drift.mean_kl) if report.drift else NOT_AVAILABLE,
    )


def _speed_cell(report: Report) -> str:
    """The checkpoint's tokens a second, with the most requests at once."""
    point = most_at_once(report.speeds)
    return f"{rate(point.tokens_per_second)} ({count(point.concurrency)} at once)" if point else NOT_AVAILABLE


def _worst_change(before: Run, after: Run) -> str:
    """The task that lost most since the run before, as `addition -0.20 points`."""
    old = {task_title(task): task for task in _tasks(before)}
    pairs = [(old[title], task) for task in _tasks(after) if (title := task_title(task)) in old]
    if not pairs:
        return NOT_AVAILABLE
    before_task, after_task = min(pairs, key=lambda pair: _gain(*pair))
    scale = scale_of(after_task)
    return f"{after_task.task} {scale.change(_gain(before_task, after_task))} {scale.unit}"


def _gain(before: TaskVerdict, after: TaskVerdict) -> float:
    """How much better the quantized model scores than that of the run before."""
    return _sign(after) * (after.candidate.value - before.candidate.value)


def _sign(task: TaskVerdict) -> int:
    """-1 where lower is better: there a score that rose is a difference below zero."""
    return -1 if task.difference * (task.candidate.value - task.baseline.value) < 0 else 1


def _made(created: str) -> str:
    """A report's time to the minute: `2026-11-21T20:02:30+00:00` is `2026-11-21 20:02`."""
    return created[:16].replace("T", " ")


def _scores_section(runs: Sequence[Run], titles: Sequence[str]) -> Section:
    """A row for each task with its score in every run; a page has the trends instead."""
    header = columns("Task", *(str(number) for number in range(1, len(runs) + 1)))
    table = Table(header, tuple(row(title, *_scores(runs, title)) for title in titles))
    return Section("Quantized scores by run", (table,), forms=SUMMARY)


def _scores(runs: Sequence[Run], title: str) -> list[str]:
    """The score of each run, from the second with its change since the last run that has one."""
    shown, last = [], None
    for run in runs:
        task = _task(run, title)
        if task is None:
            shown.append(NOT_AVAILABLE)
            continue
        scale = scale_of(task)
        change = f" ({scale.change(_gain(last, task))})" if last else ""
        shown.append(f"{scale.value(task.candidate.value)}{change}")
        last = task
    return shown


def _trends(runs: Sequence[Run], titles: Sequence[str]) -> tuple[Plane, ...]:
    names = [run.label for run in runs]
    outcomes = [run.report.outcome for run in runs]
    sizes = [float(run.report.plan.output_bytes) for run in runs]
    times = [sum(run.report.seconds.values()) for run in runs]
    bytes_ = Trend(title="Size of the checkpoint", unit="bytes", names=names, outcomes=outcomes, values=sizes)
    clock = Trend(title="Time of the run", unit="wall clock", names=names, outcomes=outcomes, values=times)
    charts = [
        *(_score_trend(runs, title) for title in titles),
        trend(bytes_, lambda value: size(round(value))),
        trend(clock, duration),
        *(trend(speed, rate) for speed in _speed_trends(runs, names, outcomes)),
    ]
    return tuple(chart for chart in charts if chart)


def _speed_trends(runs: Sequence[Run], names: Sequence[str], outcomes: Sequence[Outcome]) -> Iterator[Trend]:
    """Tokens a second of the same work, for each number of requests at once that some run has."""
    measured = [{_work(point): point for point in points_of(run.report.speeds)} for run in runs]
    for work in sorted({work for points in measured for work in points}):
        points = [points.get(work) for points in measured]
        yield Trend(
            title=f"{count(work[0])} at once: {count(round(work[1]))} tokens in, {count(round(work[2]))} out",
            unit="tokens/s",
            names=names,
            outcomes=outcomes,
            values=[point.tokens_per_second if point else None for point in points],
            bounds=[spread(point) if point else None for point in points],
        )


def _work(point: SpeedPoint) -> tuple[int, float, float]:
    return point.concurrency, point.input_len, point.output_len


def _score_trend(runs: Sequence[Run], title: str) -> Plane | None:
    tasks = [_task(run, title) for run in runs]
    scale = next(scale_of(task) for task in tasks if task)
    margins = [run.report.verdict.margin if run.report.verdict else 0.0 for run in runs]
    drawn = Trend(
        title=title,
        unit="quantized, with its interval",
        names=[run.label for run in runs],
        outcomes=[task.outcome if task else "INCONCLUSIVE" for task in tasks],
        values=[task.candidate.value if task else None for task in tasks],
        bounds=[(task.candidate.low, task.candidate.high) if task else None for task in tasks],
        baselines=[task.baseline.value if task else None for task in tasks],
        limits=[
            task.baseline.value - _sign(task) * margin if task else None
            for task, margin in zip(tasks, margins, strict=True)
        ],
    )
    return trend(drawn, scale.value)


def _task(run: Run, title: str) -> TaskVerdict | None:
    return next((task for task in _tasks(run) if task_title(task) == title), None)


def _tasks(run: Run) -> Sequence[TaskVerdict]:
    return run.report.verdict.tasks if run.report.verdict else ()
