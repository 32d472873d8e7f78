"""One quantity over several runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vexport.reports.charts.axis import Axis, Tick, padded
from vexport.reports.charts.plane import Guide, Plane, Point, Whisker
from vexport.types import Outcome

# Names longer than this together would run into each other on a phone: there the runs are numbered.
MAX_NAMES = 24
# A quantity that changes by less than this share of itself is drawn as if it changed by that much.
LEAST_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """What is drawn for each run: a value, its interval, what it is compared with; None where a run has none.

    `limits` are the values beyond which a run fails.
    """

    title: str
    unit: str
    names: Sequence[str]
    outcomes: Sequence[Outcome]
    values: Sequence[float | None]
    bounds: Sequence[tuple[float, float] | None] = ()
    baselines: Sequence[float | None] = ()
    limits: Sequence[float | None] = ()


def trend(drawn: Trend, shown: Callable[[float], str]) -> Plane | None:
    """A point for each run that has the quantity, in order, `shown` in words; None with fewer than two."""
    known = [(index, value) for index, value in enumerate(drawn.values) if value is not None]
    if len(known) < 2:
        return None
    ends = {index: pair for index, pair in enumerate(drawn.bounds) if pair is not None}
    up = _axis(drawn, [value for _, value in known], [end for pair in ends.values() for end in pair])
    across = [round(100 * (index + 0.5) / len(drawn.names), 2) for index in range(len(drawn.names))]
    numbers = [str(index + 1) for index in range(len(drawn.names))]
    named = sum(map(len, drawn.names)) <= MAX_NAMES
    labels = drawn.names if named else numbers
    return Plane(
        title=drawn.title,
        x_unit="runs, the oldest first",
        y_unit=drawn.unit,
        x_ticks=tuple(Tick(at, label) for at, label in zip(across, labels, strict=True)),
        y_ticks=tuple(Tick(_height(up, value), shown(value)) for value in up.values()),
        points=tuple(
            Point(
                x=across[index],
                y=_height(up, value),
                label=f"{'' if named else numbers[index] + ' '}{drawn.names[index]}: {shown(value)}",
                outcome=drawn.outcomes[index],
            )
            for index, value in known
        ),
        lines=(_line(across, up, drawn.values),),
        whiskers=tuple(
            Whisker(
                x=across[index], top=_height(up, high), bottom=_height(up, low), outcome=drawn.outcomes[index]
            )
            for index, (low, high) in ends.items()
        ),
        guides=_guides(drawn, across, up),
    )


def _guides(drawn: Trend, across: Sequence[float], up: Axis) -> tuple[Guide, ...]:
    """The baselines and the limits, where there are some."""
    found = []
    if any(value is not None for value in drawn.baselines):
        found.append(Guide(kind="zero", line=_line(across, up, drawn.baselines), label="baseline"))
    if any(value is not None for value in drawn.limits):
        found.append(Guide(kind="margin", line=_line(across, up, drawn.limits), label="accepted loss"))
    return tuple(found)


def _axis(drawn: Trend, values: Sequence[float], ends: Sequence[float]) -> Axis:
    others = [value for value in (*drawn.baselines, *drawn.limits) if value is not None]
    least = 0.0 if others else LEAST_SHARE * max(map(abs, values))
    return padded([*values, *ends, *others], least=least)


def _height(axis: Axis, value: float) -> float:
    """From the top, in per cent."""
    return round(100 - axis.at(value), 2)


def _line(across: Sequence[float], up: Axis, values: Sequence[float | None]) -> str:
    """The corners of a line through the runs that have a value."""
    return " ".join(
        f"{x},{_height(up, value)}" for x, value in zip(across, values, strict=True) if value is not None
    )
