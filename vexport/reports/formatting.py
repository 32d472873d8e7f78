"""Numbers as people read them: one place decides the digits, so that all formats agree."""

import math

NOT_AVAILABLE = "n/a"
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def percent(value: float | None, digits: int = 1) -> str:
    """A share of one: 0.9944 is `99.4%`."""
    return NOT_AVAILABLE if _missing(value) else f"{value:.{digits}%}"


def points(value: float | None, *, sign: bool = True) -> str:
    """A difference of two shares in percentage points: -0.0031 is `-0.31`."""
    if value is None or not math.isfinite(value):
        return NOT_AVAILABLE
    text = f"{100 * value:+.2f}" if sign else f"{100 * value:.2f}"
    return text if float(text) else "0.00"


def percent_interval(low: float | None, high: float | None) -> str:
    """A two-sided interval of shares: `98.1% to 99.6%`; `n/a` where it has no ends."""
    return NOT_AVAILABLE if _missing(low) or _missing(high) else f"{percent(low)} to {percent(high)}"


def points_interval(low: float, high: float) -> str:
    """A two-sided interval of differences in percentage points: `-1.30 to +0.10`."""
    return f"{points(low)} to {points(high)}"


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


def count(value: int) -> str:
    """An integer with thousands separated: `14,042`."""
    return f"{value:,}"


def decibels(value: float) -> str:
    """Signal-to-noise in dB with one decimal; `exact` where there is no noise at all."""
    return "exact" if value == math.inf else f"{value:.1f}" if math.isfinite(value) else NOT_AVAILABLE


def small(value: float) -> str:
    """A divergence with three significant digits: `0.00123`, `1.2e-07`."""
    return f"{value:.3g}"


def p_value(value: float) -> str:
    """A p-value with three decimals; `< 0.001` below them."""
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


def plural(number: int, noun: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _missing(value: float | None) -> bool:
    return value is None or not math.isfinite(value)
