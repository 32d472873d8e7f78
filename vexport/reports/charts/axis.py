"""Axes with round labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
        """At most seven round values on the axis."""
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
