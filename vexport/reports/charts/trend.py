"""One quantity over several runs."""

from collections.abc import Callable, Sequence

from vexport.reports.charts.axis import Tick, padded
from vexport.reports.charts.plane import Plane, Point
from vexport.types import Outcome

# More runs than these are numbered below the axis, not named.
MAX_NAMES = 6


def trend(
    title: str,
    unit: str,
    names: Sequence[str],
    outcomes: Sequence[Outcome],
    values: Sequence[float | None],
    shown: Callable[[float], str],
    bounds: Sequence[tuple[float, float] | None] = (),
) -> Plane | None:
    """A point for each run that has the quantity, in order, with its interval of `bounds`.

    None with fewer than two.
    """
    known = [(index, value) for index, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return None
    ends = {index: pair for index, pair in enumerate(bounds) if pair is not None}
    up = padded([*(value for _, value in known), *(end for pair in ends.values() for end in pair)])
    across = [round(100 * (index + 0.5) / len(names), 2) for index in range(len(names))]

    def place(index: int, value: float) -> str:
        return f"{across[index]},{round(100 - up.at(value), 2)}"

    upper = [place(index, high) for index, (_, high) in ends.items()]
    lower = [place(index, low) for index, (low, _) in ends.items()]
    numbers = [str(index + 1) for index in range(len(names))]
    named = len(names) <= MAX_NAMES
    return Plane(
        title=title,
        x_unit="runs, the oldest first",
        y_unit=unit,
        x_ticks=tuple(Tick(at, label) for at, label in zip(across, names if named else numbers, strict=True)),
        y_ticks=tuple(Tick(round(100 - up.at(value), 2), shown(value)) for value in up.values()),
        points=tuple(
            Point(
                x=across[index],
                y=round(100 - up.at(value), 2),
                label=f"{'' if named else numbers[index] + ' '}{names[index]}: {shown(value)}",
                outcome=outcomes[index],
            )
            for index, value in known
        ),
        lines=(" ".join(place(index, value) for index, value in known),),
        area=" ".join([*upper, *reversed(lower)]),
    )
