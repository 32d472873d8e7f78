"""Geometry of the chart of tasks, in per cent of the width: an SVG stretches and its text keeps its size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vexport.records import Outcome, TaskVerdict, Verdict
from vexport.reports.formatting import Scale
from vexport.reports.sentences import scale_of, task_title

_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled position on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis from `low` to `high`."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """The position of `value` in per cent of the width, clipped to the chart."""
        return round(100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low))), 2)

    def values(self) -> tuple[float, ...]:
        """Round values on the axis, at most seven."""
        least = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(least))
        step = next((step * power for step in _STEPS if step * power >= least * (1 - 1e-9)), 10 * power)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return tuple(index * step for index in range(first, last + 1))


def padded(values: Sequence[float]) -> Axis:
    """An axis with a little room on both sides of all values."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 1.0
    return Axis(low - room, high + room)


def signed(value: float) -> str:
    """A label with its sign; `0` for nothing."""
    return f"{value:+.3g}" if abs(value) > 1e-9 else "0"


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
