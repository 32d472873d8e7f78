"""Several runs beside each other, the oldest first: scores, size, speed, and what each scheme loses."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from vexport.evaluation.ladder import ladder
from vexport.reports import html as html_format
from vexport.reports import json as json_format
from vexport.reports import markdown as markdown_format
from vexport.reports import text as text_format
from vexport.reports.charts.plane import Plane, ladder_chart
from vexport.reports.charts.trend import trend
from vexport.reports.formatting import NOT_AVAILABLE, bits_per_weight, duration, size, small
from vexport.reports.sentences import scale_of, schemes_in_use, task_title
from vexport.types import Report, TaskVerdict

_HEADER = ("Run", "Made (UTC)", "Result", "Schemes", "Size", "Bits", "Time", "KL")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The runs in the order in which they were made, and every task that any of them has."""

    runs: tuple[Report, ...]
    tasks: tuple[str, ...]


def history(reports: Sequence[Report]) -> History:
    """Runs by the time of their report, whatever the order in which they were named."""
    runs = tuple(sorted(reports, key=lambda report: report.created))
    tasks = dict.fromkeys(task_title(task) for run in runs for task in _tasks(run))
    return History(runs=runs, tasks=tuple(tasks))


def text(reports: Sequence[Report]) -> str:
    """One line a run, then one a task with the scores of all runs."""
    found = history(reports)
    runs = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in _HEADER:
        runs.add_column(name, overflow="fold")
    for row in _rows(found):
        runs.add_row(*map(text_format.harmless, row))
    scores = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    scores.add_column("Task", overflow="fold")
    scores.add_column("Quantized, the oldest run first", overflow="fold")
    for title in found.tasks:
        scores.add_row(text_format.harmless(title), "  ".join(_scores(found, title)))
    return text_format.plain(runs) + (text_format.plain(scores) if found.tasks else "")


def json(reports: Sequence[Report]) -> str:
    """The reports, the oldest first."""
    return json_format.reports(history(reports).runs)


def markdown(reports: Sequence[Report]) -> str:
    """The same two tables."""
    found = history(reports)
    parts = [f"## {len(found.runs)} runs", markdown_format.table(_HEADER, _rows(found))]
    if found.tasks:
        header = ("Task", *(str(index + 1) for index in range(len(found.runs))))
        rows = ((title, *_scores(found, title)) for title in found.tasks)
        parts.append("### Quantized scores by run\n\n" + markdown_format.table(header, rows))
    return "\n\n".join(parts) + "\n"


def html(reports: Sequence[Report]) -> str:
    """One page: the runs, the ladder over schemes, the trends."""
    found = history(reports)
    context = {
        "runs": found.runs,
        "made": (_made(found.runs[0].created), _made(found.runs[-1].created)),
        "header": _HEADER,
        "rows": _rows(found),
        "ladder": ladder_chart(ladder(found.runs)),
        "trends": [chart for chart in _trends(found) if chart],
    }
    return html_format.render("history.html", context)


def _rows(found: History) -> list[tuple[str, ...]]:
    return [
        (
            f"{number} {run.name}",
            _made(run.created),
            run.outcome,
            schemes_in_use(run.plan),
            size(run.plan.output_bytes),
            bits_per_weight(run.plan.output_bytes, run.plan.parameters),
            duration(sum(run.seconds.values())),
            small(run.drift.mean_kl) if run.drift else NOT_AVAILABLE,
        )
        for number, run in enumerate(found.runs, 1)
    ]


def _made(created: str) -> str:
    """A report's time to the minute: `2026-11-21T20:02:30+00:00` is `2026-11-21 20:02`."""
    return created[:16].replace("T", " ")


def _scores(found: History, title: str) -> list[str]:
    tasks = [_task(run, title) for run in found.runs]
    return [scale_of(task).value(task.candidate.value) if task else NOT_AVAILABLE for task in tasks]


def _trends(found: History) -> list[Plane | None]:
    names = [run.name for run in found.runs]
    outcomes = [run.outcome for run in found.runs]
    sizes = [float(run.plan.output_bytes) for run in found.runs]
    times = [sum(run.seconds.values()) for run in found.runs]
    return [
        *(_score_trend(found, title) for title in found.tasks),
        trend("Size of the checkpoint", "bytes", names, outcomes, sizes, lambda value: size(round(value))),
        trend("Time of the run", "wall clock", names, outcomes, times, duration),
    ]


def _score_trend(found: History, title: str) -> Plane | None:
    tasks = [_task(run, title) for run in found.runs]
    scale = next(scale_of(task) for task in tasks if task)
    return trend(
        title,
        "quantized, with its interval",
        [run.name for run in found.runs],
        [task.outcome if task else "INCONCLUSIVE" for task in tasks],
        [task.candidate.value if task else None for task in tasks],
        scale.value,
        [(task.candidate.low, task.candidate.high) if task else None for task in tasks],
    )


def _task(run: Report, title: str) -> TaskVerdict | None:
    return next((task for task in _tasks(run) if task_title(task) == title), None)


def _tasks(run: Report) -> Sequence[TaskVerdict]:
    return run.verdict.tasks if run.verdict else ()
