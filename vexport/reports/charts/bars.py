"""Quantities as bars on one scale: sizes before and after, what each group of layers costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from vexport.reports.formatting import ratio, size, small
from vexport.types import KindSize, MixedScheme, SchemeLoss, Sensitivity

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
    remark: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars on one scale; `wide` gives the labels room."""

    bars: tuple[Bar, ...]
    wide: bool = False


def size_bars(sizes: Sequence[KindSize]) -> Bars:
    """What each kind of layer weighs before and after, in order."""
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
            remark="estimated" if loss.measured is None else "measured",
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
