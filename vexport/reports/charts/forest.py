"""Differences with their intervals against the accepted loss."""

from collections.abc import Sequence
from dataclasses import dataclass

from vexport.reports.charts.axis import Axis, Tick, padded, signed
from vexport.reports.formatting import Scale
from vexport.reports.sentences import scale_of, task_title
from vexport.types import Outcome, TaskVerdict, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestRow:
    """One task's difference and its interval, placed."""

    title: str
    outcome: Outcome
    at: float
    low: float
    high: float
    difference: str
    interval: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """The tasks of one scale against zero and the accepted loss, which `accepted` has in words."""

    unit: str
    accepted: str
    rows: tuple[ForestRow, ...]
    ticks: tuple[Tick, ...]
    zero: float
    margin: float


def forests(verdict: Verdict) -> tuple[Forest, ...]:
    """One chart for the tasks scored in shares and one for those in their metric's own units."""
    by_scale: dict[Scale, list[TaskVerdict]] = {}
    for task in verdict.tasks:
        by_scale.setdefault(scale_of(task), []).append(task)
    return tuple(_forest(scale, tasks, verdict.margin) for scale, tasks in by_scale.items())


def _forest(scale: Scale, tasks: Sequence[TaskVerdict], margin: float) -> Forest:
    axis = padded([*(end for task in tasks for end in (task.low, task.high)), -margin, 0.0])
    factor = 100 if scale.shares else 1
    return Forest(
        unit="points" if scale.shares else "units of the metric",
        accepted=f"{scale.limit(margin)} {scale.unit}",
        rows=tuple(_forest_row(scale, task, axis) for task in tasks),
        ticks=tuple(Tick(axis.at(value), signed(factor * value)) for value in axis.values()),
        zero=axis.at(0.0),
        margin=axis.at(-margin),
    )


def _forest_row(scale: Scale, task: TaskVerdict, axis: Axis) -> ForestRow:
    return ForestRow(
        title=task_title(task),
        outcome=task.outcome,
        at=axis.at(task.difference),
        low=axis.at(task.low),
        high=axis.at(task.high),
        difference=scale.change(task.difference),
        interval=scale.changes(task.low, task.high),
    )
