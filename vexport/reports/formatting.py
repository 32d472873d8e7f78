"""Numbers as people read them: one place decides the digits, so that all formats agree."""

import math
from dataclasses import dataclass

NOT_AVAILABLE = "n/a"
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def percent(value: float | None, digits: int = 1) -> str:
    """A share of one: 0.9944 is `99.4%`."""
    return NOT_AVAILABLE if value is None or not math.isfinite(value) else f"{value:.{digits}%}"


@dataclass(frozen=True, slots=True)
class Scale:
    """The reading of one metric's numbers: shares in per cent and points, anything else in its own units."""

    shares: bool

    @property
    def unit(self) -> str:
        """The unit of a difference."""
        return "points" if self.shares else "of the metric"

    def value(self, value: float | None) -> str:
        """A score: `99.4%`, or `27.31`."""
        if self.shares or value is None:
            return percent(value)
        return f"{value:.4g}"

    def interval(self, low: float | None, high: float | None) -> str:
        """A two-sided interval of scores: `98.1% to 99.6%`; `n/a` where it has no ends."""
        return _interval(self.value(low), self.value(high))

    def change(self, value: float, *, sign: bool = True) -> str:
        """A difference with two decimals: -0.0031 is `-0.31` points."""
        if not math.isfinite(value):
            return NOT_AVAILABLE
        number = round(value * (100 if self.shares else 1), 2) + 0.0
        return f"{number:+.2f}" if sign and number else f"{number:.2f}"

    def limit(self, value: float) -> str:
        """A limit as it was set: 0.02 is `2` points."""
        return f"{value * (100 if self.shares else 1):.6g}"

    def changes(self, low: float, high: float) -> str:
        """A two-sided interval of differences: `-1.30 to +0.10`."""
        return _interval(self.change(low), self.change(high))


def percent_interval(low: float | None, high: float | None) -> str:
    """A two-sided interval of shares: `98.1% to 99.6%`; `n/a` where it has no ends."""
    return _interval(percent(low), percent(high))


def size(num_bytes: int) -> str:
    """Bytes in decimal units with three significant digits: 3938304 is `3.94 MB`."""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"


def ratio(part: int, whole: int) -> str:
    """`part` of `whole` in per cent; `n/a` for nothing of nothing."""
    return percent(part / whole, 0) if whole else NOT_AVAILABLE


def bits_per_weight(num_bytes: int, parameters: int) -> str:
    """Stored bits over parameters, scales and kept layers included."""
    return f"{8 * num_bytes / parameters:.2f}" if parameters else NOT_AVAILABLE


def count(value: int | None) -> str:
    """An integer with thousands separated: `14,042`."""
    return NOT_AVAILABLE if value is None else f"{value:,}"


def decibels(value: float) -> str:
    """Signal-to-noise in dB with one decimal; `exact` where there is no noise at all."""
    return "exact" if value == math.inf else f"{value:.1f}" if math.isfinite(value) else NOT_AVAILABLE


def small(value: float) -> str:
    """A divergence with three significant digits: `0.00123`, `1.2e-07`."""
    return f"{value:.3g}"


def p_value(value: float | None) -> str:
    """A p-value with three decimals; `< 0.001` below them."""
    if value is None:
        return NOT_AVAILABLE
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def duration(seconds: float) -> str:
    """Seconds as `0.4 s`, `12 s`, `3 min 05 s` or `2 h 14 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """`1 error`, `2 errors`; `nouns` where an s is not enough."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {nouns or f'{noun}s'}"


def _interval(low: str, high: str) -> str:
    return NOT_AVAILABLE if NOT_AVAILABLE in (low, high) else f"{low} to {high}"
