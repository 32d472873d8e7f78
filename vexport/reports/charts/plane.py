"""Points and lines over two axes: documents against a difference, bytes or bits against a loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vexport.reports.charts.axis import Axis, Tick, padded, signed
from vexport.reports.charts.labels import Place, label_places
from vexport.reports.formatting import count, size, small
from vexport.reports.sentences import looks_scale
from vexport.types import Look, MixedScheme, Outcome, SchemePoint, Verdict

# What a loss of zero is drawn as, below the least positive one.
_BELOW = 3.0
# Per cent of the chart: what is nearer than this has its marks on each other.
_SAME_PLACE = 4.0
# Costs that differ by less than this share of themselves are drawn as if they differed by that much.
_LEAST_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A labelled place, in per cent from the left and from the top; `mark` is written next to it, at `place`.

    One that is `grey` is drawn back: another is better in everything.
    """

    x: float
    y: float
    label: str
    outcome: Outcome | None = None
    mark: str = ""
    grey: bool = False
    place: Place = Place()


@dataclass(frozen=True, slots=True, kw_only=True)
class Whisker:
    """The interval of a point: `top` and `bottom` in per cent from the top."""

    x: float
    top: float
    bottom: float
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """What points are compared with: a line through the corners `line`, and what it is."""

    kind: Literal["zero", "margin"]
    line: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """A chart: `lines` and `area` are the points of SVG shapes in a box of 100 x 100."""

    title: str
    x_unit: str
    y_unit: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    points: tuple[Point, ...] = ()
    lines: tuple[str, ...] = ()
    whiskers: tuple[Whisker, ...] = ()
    guides: tuple[Guide, ...] = ()
    area: str = ""
    zero: float | None = None
    margin: float | None = None


def looks_charts(verdict: Verdict) -> tuple[Plane, ...]:
    """For each task that was read until it was decided: its interval narrowing against the accepted loss."""
    by_task: dict[str, list[Look]] = {}
    for look in verdict.looks:
        by_task.setdefault(look.task, []).append(look)
    return tuple(_looks(task, looks, verdict) for task, looks in by_task.items())


def tradeoff_chart(mixed: MixedScheme) -> Plane | None:
    """The least loss at every size, and the mixture that was chosen; None where there is no choice."""
    if len(mixed.frontier) < 2:
        return None
    across = padded([one.output_bytes for one in mixed.frontier])
    up = _log_axis([one.loss for one in mixed.frontier])
    line = " ".join(
        f"{across.at(one.output_bytes)},{_height(up, one.loss)}" for one in mixed.frontier if one.loss > 0
    )
    chosen = Point(
        x=across.at(mixed.output_bytes),
        y=_height(up, mixed.loss),
        label=f"chosen: {size(mixed.output_bytes)}, {small(mixed.loss)} nats per token",
    )
    return Plane(
        title="Least loss at every size",
        x_unit="size of the checkpoint",
        y_unit="nats per token",
        x_ticks=tuple(Tick(across.at(value), size(round(value))) for value in across.values()),
        y_ticks=_log_ticks(up),
        points=(chosen,),
        lines=(line,),
    )


def scheme_chart(runs: Sequence[SchemePoint]) -> Plane | None:
    """Bits per weight against KL, a point for each run that has both; None with fewer than two.

    A line joins the runs of one source on the same tokens; the title says where not all have the same.
    """
    known = [(run, run.mean_kl) for run in runs if run.mean_kl is not None]
    if len(known) < 2:
        return None
    across = padded([run.bits_per_weight for run, _ in known])
    up = _log_axis([loss for _, loss in known])
    marks = tuple(
        Point(
            x=across.at(run.bits_per_weight),
            y=_height(up, loss),
            label=f"{run.number} {run.name}: {run.bits_per_weight:.2f} bits, KL {small(loss)}",
            outcome=run.outcome,
        )
        for run, loss in known
    )
    alike = len({run.digest for run, _ in known}) == 1
    return Plane(
        title="KL against bits per weight" + ("" if alike else ": not all on the same prompts"),
        x_unit="bits per weight, everything stored",
        y_unit="KL, nats per token",
        x_ticks=tuple(Tick(across.at(value), f"{value:g}") for value in across.values()),
        y_ticks=_log_ticks(up),
        points=_placed(_marked(marks, [run.number for run, _ in known])),
        lines=_by_source([run for run, _ in known], marks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A scheme on a chart of loss: what it costs across (bytes, tokens/s, ...), and the KL that it has."""

    name: str
    at: float
    kl: float
    outcome: Outcome | None
    grey: bool


def pareto_chart(title: str, unit: str, costs: Sequence[Cost], shown: Callable[[float], str]) -> Plane | None:
    """The loss of each scheme against a cost, `shown` in words; None with fewer than two.

    A line joins the schemes that are not grey.
    """
    if len(costs) < 2:
        return None
    least = _LEAST_SHARE * max(cost.at for cost in costs)
    across, up = padded([cost.at for cost in costs], least=least), _log_axis([cost.kl for cost in costs])
    ordered = sorted(costs, key=lambda cost: cost.at)
    points = tuple(
        Point(
            x=across.at(cost.at),
            y=_height(up, cost.kl),
            label=f"{cost.name}: {shown(cost.at)}, KL {small(cost.kl)}",
            outcome=cost.outcome,
            mark=cost.name,
            grey=cost.grey,
        )
        for cost in ordered
    )
    front = [point for point in points if not point.grey]
    return Plane(
        title=title,
        x_unit=unit,
        y_unit="KL, nats per token",
        x_ticks=tuple(Tick(across.at(value), shown(value)) for value in across.values()),
        y_ticks=_log_ticks(up),
        points=_placed(points),
        lines=(" ".join(f"{point.x},{point.y}" for point in front),) if len(front) > 1 else (),
    )


def _placed(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points with places for their marks."""
    places = label_places([(point.x, point.y) for point in points], [point.mark for point in points])
    return tuple(replace(point, place=place) for point, place in zip(points, places, strict=True))


def _by_source(runs: Sequence[SchemePoint], points: Sequence[Point]) -> tuple[str, ...]:
    """A line for each source and its tokens that has runs of different sizes."""
    lines: dict[tuple[str, str], list[str]] = {}
    for run, point in zip(runs, points, strict=True):
        lines.setdefault((run.source, run.digest), []).append(f"{point.x},{point.y}")
    return tuple(" ".join(line) for line in lines.values() if len({at.split(",")[0] for at in line}) > 1)


def _marked(points: Sequence[Point], numbers: Sequence[int]) -> tuple[Point, ...]:
    """The points with their numbers; the first of those that lie on each other has those of all."""
    joined: dict[int, list[int]] = {}
    for point, number in zip(points, numbers, strict=True):
        first = next(
            index
            for index, other in enumerate(points)
            if abs(other.x - point.x) < _SAME_PLACE and abs(other.y - point.y) < _SAME_PLACE
        )
        joined.setdefault(first, []).append(number)
    return tuple(
        replace(point, mark=", ".join(map(str, sorted(joined.get(index, ())))))
        for index, point in enumerate(points)
    )


def _looks(task: str, looks: Sequence[Look], verdict: Verdict) -> Plane:
    scale = looks_scale(verdict, task)
    factor = 100 if scale.shares else 1
    across = Axis(0, max(look.of for look in looks))
    # The first looks know next to nothing: the axis belongs to what decides.
    near = [look for look in looks if look.high - look.low < 20 * verdict.margin] or looks[-1:]
    up = padded([end for look in near for end in (look.low, look.high)] + [-verdict.margin, 0.0])
    upper = [f"{across.at(look.read)},{100 - up.at(look.high)}" for look in looks]
    lower = [f"{across.at(look.read)},{100 - up.at(look.low)}" for look in looks]
    last = looks[-1]
    return Plane(
        title=f"{task}: {last.outcome} after {count(last.read)} of {count(last.of)} documents",
        x_unit="documents read",
        y_unit=f"difference, {scale.unit}",
        x_ticks=tuple(Tick(across.at(value), count(round(value))) for value in across.values()),
        y_ticks=tuple(Tick(round(100 - up.at(value), 2), signed(factor * value)) for value in up.values()),
        area=" ".join([*upper, *reversed(lower)]),
        zero=round(100 - up.at(0.0), 2),
        margin=round(100 - up.at(-verdict.margin), 2),
    )


def _log_axis(losses: Sequence[float]) -> Axis:
    """An axis of decimal logarithms; what lost nothing stands below the least loss."""
    positive = [loss for loss in losses if loss > 0] or [1.0]
    room = [min(positive) / _BELOW] if len(positive) < len(losses) else []
    return padded([math.log10(loss) for loss in [*positive, *room]])


def _height(axis: Axis, loss: float) -> float:
    """From the top, in per cent."""
    return round(100 - (axis.at(math.log10(loss)) if loss > 0 else 0.0), 2)


def _log_ticks(axis: Axis) -> tuple[Tick, ...]:
    """Whole powers of ten, or what is round between them where there is none."""
    whole = [value for value in axis.values() if value == round(value)]
    return tuple(Tick(round(100 - axis.at(value), 2), f"{10**value:.1g}") for value in whole or axis.values())
