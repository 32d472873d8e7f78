"""Geometry of the charts, in per cent of the width: an SVG stretches and its text keeps its size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from vexport.reports.formatting import Scale, decibels, plural, ratio, size, small
from vexport.reports.sentences import scale_of, task_title
from vexport.types import (
    KindSize,
    LayerError,
    MixedScheme,
    Outcome,
    SchemeLoss,
    Sensitivity,
    TaskVerdict,
    Verdict,
)

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
        step = _round_step((self.high - self.low) / 6)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return tuple(index * step for index in range(first, last + 1))


def padded(values: Sequence[float], *, least: float = 0.0) -> Axis:
    """An axis with a little room on both sides of all values.

    It spans `least` at least, the values in its middle: a difference that means nothing looks like nothing.
    """
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or (0.0 if least else 1.0)
    room = max(room, (least - (high - low)) / 2)
    return Axis(low - room, high + room)


def _round_step(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((step * power for step in _STEPS if step * power >= least * (1 - 1e-9)), 10 * power)


def signed(value: float) -> str:
    """A label with its sign; `0` for nothing."""
    return f"{value:+.3g}" if abs(value) > 1e-9 else "0"


# Bars that are drawn; a table has the others.
MAX_GROUPS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One quantity, or one before and after: widths in per cent of the largest, and the values in words."""

    label: str
    note: str = ""
    before: float | None = None
    after: float
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars on one scale; `wide` gives the labels room."""

    bars: tuple[Bar, ...]
    wide: bool = False


def size_bars(sizes: Sequence[KindSize]) -> Bars:
    """Bars of what each kind of layer weighs before and after, in order."""
    largest = max((max(kind.source_bytes, kind.output_bytes) for kind in sizes), default=0) or 1
    bars = (
        Bar(
            label=kind.kind,
            before=_width(kind.source_bytes, largest),
            after=_width(kind.output_bytes, largest),
            value=f"{size(kind.source_bytes)} to {size(kind.output_bytes)}",
            remark=f"({ratio(kind.output_bytes, kind.source_bytes)})",
        )
        for kind in sizes
    )
    return Bars(tuple(bars))


def loss_bars(sensitivity: Sensitivity, mixed: MixedScheme | None) -> Bars:
    """Each group under its most costly scheme, the most sensitive first, at most MAX_GROUPS."""
    chosen = chosen_schemes(mixed)
    worst = [(group.name, max(group.schemes, key=_loss)) for group in sensitivity.groups if group.schemes]
    worst.sort(key=lambda pair: -pair[1].loss)
    largest = max((loss.loss for _, loss in worst), default=0.0) or 1.0
    bars = (
        Bar(
            label=name,
            note=f"{loss.scheme}, chosen {chosen[name]}"
            if chosen.get(name, loss.scheme) != loss.scheme
            else loss.scheme,
            after=_width(max(0.0, loss.loss), largest),
            value=small(loss.loss),
        )
        for name, loss in worst[:MAX_GROUPS]
    )
    return Bars(tuple(bars), wide=True)


def chosen_schemes(mixed: MixedScheme | None) -> dict[str, str]:
    """The scheme of each group in a mixed scheme."""
    return {choice.name: choice.scheme for choice in mixed.choices} if mixed else {}


def _loss(scheme: SchemeLoss) -> float:
    return scheme.loss


def _width(value: float, largest: float) -> float:
    return round(100 * value / largest, 2)


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


MAX_DOTS = 240
LEAST_SPAN_DB = 3.0
"""The axis spans this at least: half a bit is 3 dB, and layers of one scheme differ by tenths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """The layers of one kind and scheme: a dot each, and what they span."""

    title: str
    scheme: str
    layers: str
    lowest: str
    median: str
    median_at: float
    dots: tuple[Tick, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChart:
    """Signal-to-noise by kind of layer; `hidden` dots were left out between their neighbours."""

    rows: tuple[LayerRow, ...]
    ticks: tuple[Tick, ...]
    hidden: int


def layer_chart(layers: Sequence[LayerError]) -> LayerChart | None:
    """Group the layers by kind and scheme; None where no layer has a finite signal-to-noise."""
    noisy = [layer for layer in layers if math.isfinite(layer.snr_db)]
    if not noisy:
        return None
    axis = padded([layer.snr_db for layer in noisy], least=LEAST_SPAN_DB)
    kinds: dict[tuple[str, str], list[LayerError]] = {}
    for layer in noisy:
        kinds.setdefault((layer_kind(layer.name), layer.scheme), []).append(layer)
    rows = tuple(_layer_row(kind, scheme, members, axis) for (kind, scheme), members in kinds.items())
    ticks = tuple(Tick(axis.at(value), f"{value:g}") for value in axis.values())
    hidden = len(noisy) - sum(len(row.dots) for row in rows)
    return LayerChart(rows=rows, ticks=ticks, hidden=hidden)


def layer_kind(name: str) -> str:
    """Return the name without its numbers: `model.layers.3.mlp.experts.7.up_proj` is
    `mlp.experts.up_proj`.
    """
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    start = numbers[0] if numbers else 0
    return ".".join(part for part in parts[start:] if not part.isdecimal())


def _layer_row(kind: str, scheme: str, members: Sequence[LayerError], axis: Axis) -> LayerRow:
    ordered = sorted(members, key=lambda layer: layer.snr_db)
    middle = median(layer.snr_db for layer in ordered)
    return LayerRow(
        title=kind,
        scheme=scheme,
        layers=plural(len(ordered), "layer"),
        lowest=decibels(ordered[0].snr_db),
        median=decibels(middle),
        median_at=axis.at(middle),
        dots=tuple(
            Tick(axis.at(layer.snr_db), f"{layer.name}: {decibels(layer.snr_db)} dB")
            for layer in _thinned(ordered)
        ),
    )


def _thinned(ordered: Sequence[LayerError]) -> Sequence[LayerError]:
    """Return at most MAX_DOTS layers evenly over the order; the lowest and the highest stay."""
    if len(ordered) <= MAX_DOTS:
        return ordered
    last = len(ordered) - 1
    return [ordered[round(index * last / (MAX_DOTS - 1))] for index in range(MAX_DOTS)]
