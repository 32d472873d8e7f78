"""Show a metric's numbers and margin: per cent and points for shares, else the metric's unit."""

import math
from dataclasses import dataclass

from vexport.records.margin import Margin, Unit
from vexport.records.values import decimals_of

NOT_AVAILABLE = "n/a"
_MOST_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Format of a metric's numbers.

    `measure` is the unit of the metric's differences. `margin` is the acceptable loss in this unit.
    If the user gave a share of the baseline's value, `relative_margin` is this share.
    """

    measure: Unit
    metric: str
    margin: float
    relative_margin: float | None

    @property
    def unit(self) -> str:
        """Unit of a difference: `points`, `nats per word`, or `in bleu`."""
        if self.measure == "share":
            return "points"
        return f"in {self.metric}" if self.measure == "metric" else self.measure

    @property
    def digits(self) -> int:
        """Number of decimals of differences. Two digits of a relative margin are visible."""
        least = 3 if self.measure.startswith("nats") else 2
        return least if self.relative_margin is None else max(least, decimals_of(self.margin))

    def value(self, value: float) -> str:
        """Return a score: `99.4%`, or `27.31`."""
        return percent(value) if self.measure == "share" else f"{value:.4g}"

    def interval(self, low: float, high: float) -> str:
        """Return a two-sided interval of scores: `98.1% to 99.6%`, or `n/a` without ends."""
        return interval(self.value(low), self.value(high))

    def change(self, value: float) -> str:
        """Return a difference with its decimals: -0.0031 gives `-0.31` points."""
        if not math.isfinite(value):
            return NOT_AVAILABLE
        number = round(self._scaled(value), self.digits) + 0.0
        return f"{number:+.{self.digits}f}" if number else f"{0:.{self.digits}f}"

    def changes(self, low: float, high: float) -> str:
        """Return a two-sided interval of differences: `-1.30 to +0.10`."""
        return interval(self.change(low), self.change(high))

    def number(self, value: float) -> str:
        """Return a difference for a sentence, with one decimal from 10 up.

        More decimals are shown if the rounded value would equal the margin although the exact value
        does not.
        """
        scaled, limit = self._scaled(value), self._scaled(self.margin)
        least = 1 if abs(scaled) >= 10 else self.digits
        for digits in range(least, max(_MOST_DIGITS, least + 1)):
            text = f"{scaled:.{digits}f}"
            if abs(scaled) == limit or abs(float(text)) != limit:
                break
        return text if float(text) else text.lstrip("-")

    def signed(self, value: float) -> str:
        """Return a difference for a sentence, with its sign."""
        text = self.number(value)
        return text if text.startswith("-") or not float(text) else f"+{text}"

    @property
    def bare_limit(self) -> str:
        """The margin without its unit: `2`, or `0.00995 (1%)` if it is relative."""
        if self.relative_margin is None:
            return f"{self._scaled(self.margin):.6g}"
        return f"{self.margin:.3g} ({Margin(self.relative_margin, True)})"

    @property
    def limit(self) -> str:
        """The margin with its unit: `2 points`, or `0.00995 (1%) nats per word`."""
        is_one = self.measure == "share" and self.bare_limit == "1"
        return f"{self.bare_limit} {'point' if is_one else self.unit}"

    @property
    def short_limit(self) -> str:
        """The margin in sentences on several tasks: `2 points`, or `1%` if it is relative."""
        return (
            self.limit if self.relative_margin is None else str(Margin(self.relative_margin, True))
        )

    def _scaled(self, value: float) -> float:
        return 100 * value if self.measure == "share" else value


def percent(value: float | None, digits: int = 1) -> str:
    """Return a share in per cent: 0.9944 gives `99.4%`."""
    return NOT_AVAILABLE if value is None or not math.isfinite(value) else f"{value:.{digits}%}"


def interval(low: str, high: str) -> str:
    """Return `98.1% to 99.6%`, or `n/a` without ends."""
    return NOT_AVAILABLE if NOT_AVAILABLE in (low, high) else f"{low} to {high}"
