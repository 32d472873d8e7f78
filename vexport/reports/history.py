"""Several runs next to each other, the oldest first: scores, changes, size, speed, what each scheme loses."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table

from vexport.evaluation.ladder import ladder
from vexport.reports import html as html_format
from vexport.reports import json as json_format
from vexport.reports import markdown as markdown_format
from vexport.reports import text as text_format
from vexport.reports.charts.plane import Plane, ladder_chart
from vexport.reports.charts.trend import Trend, trend
from vexport.reports.formatting import NOT_AVAILABLE, bits_per_weight, duration, size, small
from vexport.reports.sentences import (
    outcome_line,
    report_device,
    scale_of,
    schemes_in_use,
    task_title,
)
from vexport.types import Report, TaskVerdict

_HEADER = ("Run", "Made (UTC)", "Result", "Since the run before", "Schemes", "Size", "Bits", "Time", "KL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: what it is called here, as no other of its history, and where its page lies.

    `href` is relative to the page of the history, empty where the run has no page.
    """

    report: Report
    folder: str = ""
    href: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The runs in the order in which they were made, and every task that any of them has."""

    runs: tuple[Run, ...]
    tasks: tuple[str, ...]


def history(runs: Sequence[Run]) -> History:
    """Runs by the time of their report, whatever the order in which they were named."""
    ordered = sorted(runs, key=lambda run: run.report.created)
    tasks = dict.fromkeys(task_title(task) for run in ordered for task in _tasks(run))
    return History(runs=_labelled(ordered), tasks=tuple(tasks))


def text(runs: Sequence[Run]) -> str:
    """One line a run, then one a task with the scores of all runs."""
    found = history(runs)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in _HEADER:
        table.add_column(name, overflow="fold", no_wrap=name.startswith("Made"))
    for row in _rows(found):
        table.add_row(*map(text_format.harmless, row))
    scores = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    scores.add_column("Task", overflow="fold")
    scores.add_column("Quantized, the oldest run first", overflow="fold")
    for title in found.tasks:
        scores.add_row(text_format.harmless(title), "  ".join(_scores(found, title)))
    return text_format.plain(table) + (text_format.plain(scores) if found.tasks else "")


def json(runs: Sequence[Run]) -> str:
    """The reports, the oldest first."""
    return json_format.reports([run.report for run in history(runs).runs])


def markdown(runs: Sequence[Run]) -> str:
    """The same two tables."""
    found = history(runs)
    parts = [f"## {len(found.runs)} runs", markdown_format.table(_HEADER, _rows(found))]
    if found.tasks:
        header = ("Task", *(str(index + 1) for index in range(len(found.runs))))
        rows = ((title, *_scores(found, title)) for title in found.tasks)
        parts.append("### Quantized scores by run\n\n" + markdown_format.table(header, rows))
    return "\n\n".join(parts) + "\n"


def html(runs: Sequence[Run]) -> str:
    """One page: the runs, the ladder over schemes, the trends."""
    found = history(runs)
    reports = [replace(run.report, name=run.label) for run in found.runs]
    context = {
        "runs": found.runs,
        "made": (_made(reports[0].created), _made(reports[-1].created)),
        "header": _HEADER,
        "rows": list(zip(found.runs, _rows(found), strict=True)),
        "ladder": ladder_chart(ladder(reports)),
        "trends": [chart for chart in _trends(found) if chart],
    }
    return html_format.render("history.html", context)


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


def _rows(found: History) -> list[tuple[str, ...]]:
    changes = ["first run", *map(_worst_change, found.runs, found.runs[1:])]
    return [
        (
            f"{number} {run.label}",
            _made(run.report.created),
            outcome_line(run.report.outcome, report_device(run.report)),
            change,
            schemes_in_use(run.report.plan),
            size(run.report.plan.output_bytes),
            bits_per_weight(run.report.plan.output_bytes, run.report.plan.parameters),
            duration(sum(run.report.seconds.values())),
            small(run.report.drift.mean_kl) if run.report.drift else NOT_AVAILABLE,
        )
        for number, (run, change) in enumerate(zip(found.runs, changes, strict=True), 1)
    ]


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


def _scores(found: History, title: str) -> list[str]:
    """The score of each run, from the second with its change since the last run that has one."""
    shown, last = [], None
    for run in found.runs:
        task = _task(run, title)
        if task is None:
            shown.append(NOT_AVAILABLE)
            continue
        scale = scale_of(task)
        change = f" ({scale.change(_gain(last, task))})" if last else ""
        shown.append(f"{scale.value(task.candidate.value)}{change}")
        last = task
    return shown


def _trends(found: History) -> list[Plane | None]:
    names = [run.label for run in found.runs]
    outcomes = [run.report.outcome for run in found.runs]
    sizes = [float(run.report.plan.output_bytes) for run in found.runs]
    times = [sum(run.report.seconds.values()) for run in found.runs]
    bytes_ = Trend(title="Size of the checkpoint", unit="bytes", names=names, outcomes=outcomes, values=sizes)
    clock = Trend(title="Time of the run", unit="wall clock", names=names, outcomes=outcomes, values=times)
    return [
        *(_score_trend(found, title) for title in found.tasks),
        trend(bytes_, lambda value: size(round(value))),
        trend(clock, duration),
    ]


def _score_trend(found: History, title: str) -> Plane | None:
    tasks = [_task(run, title) for run in found.runs]
    scale = next(scale_of(task) for task in tasks if task)
    margins = [run.report.verdict.margin if run.report.verdict else 0.0 for run in found.runs]
    drawn = Trend(
        title=title,
        unit="quantized, with its interval",
        names=[run.label for run in found.runs],
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
