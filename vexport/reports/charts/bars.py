"""Quantities as bars on one scale: sizes before and after, what each group of layers costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from vexport.reports.formatting import bits_per_weight, ratio, size, small
from vexport.types import KindSize, MixedScheme, Plan, SchemeLoss, Sensitivity

# Bars that are drawn; a table has the others.
MAX_GROUPS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One quantity, or one before and after: widths in per cent of the largest, and the values in words."""

    label: str
    note: str = ""
    before: float | None = None
    after: float | None = None
    value: str
    remark: str
    mono: bool = True


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars on one scale; `wide` gives the labels room."""

    bars: tuple[Bar, ...]
    wide: bool = False


def plan_bars(plan: Plan) -> Bars:
    """The checkpoint before and after."""
    largest = max(plan.source_bytes, plan.output_bytes, 1)

    def remark(num_bytes: int) -> str:
        return f"({bits_per_weight(num_bytes, plan.parameters)} bits)"

    before, after = plan.source_bytes, plan.output_bytes
    return Bars(
        (
            Bar(
                label="before",
                before=_width(before, largest),
                value=size(before),
                remark=remark(before),
                mono=False,
            ),
            Bar(
                label="after",
                after=_width(after, largest),
                value=size(after),
                remark=remark(after),
                mono=False,
            ),
        )
    )


def size_bars(sizes: Sequence[KindSize]) -> Bars:
    """What each kind of layer weighs before and after, in order."""
    largest = max((max(kind.source_bytes, kind.output_bytes) for kind in sizes), default=0) or 1
    return Bars(
        tuple(
            Bar(
                label=kind.kind,
                before=_width(kind.source_bytes, largest),
                after=_width(kind.output_bytes, largest),
                value=f"{size(kind.source_bytes)} to {size(kind.output_bytes)}",
                remark=f"({ratio(kind.output_bytes, kind.source_bytes)})",
            )
            for kind in sizes
        )
    )


def loss_bars(sensitivity: Sensitivity, mixed: MixedScheme | None) -> Bars:
    """Each group under its most costly scheme, the most sensitive first, at most MAX_GROUPS."""
    chosen = chosen_schemes(mixed)
    worst = [(group.name, _worst(group.schemes)) for group in sensitivity.groups if group.schemes]
    worst.sort(key=lambda pair: -pair[1].loss)
    largest = max((loss.loss for _, loss in worst), default=0.0) or 1.0
    bars = tuple(
        Bar(
            label=name,
            note=loss.scheme
            + (f", chosen {chosen[name]}" if chosen.get(name, loss.scheme) != loss.scheme else ""),
            after=_width(max(0.0, loss.loss), largest),
            value=small(loss.loss),
            remark="estimated" if loss.measured is None else "measured",
        )
        for name, loss in worst[:MAX_GROUPS]
    )
    return Bars(bars, wide=True)


def chosen_schemes(mixed: MixedScheme | None) -> dict[str, str]:
    """The scheme of each group in a mixed scheme."""
    return {choice.name: choice.scheme for choice in mixed.choices} if mixed else {}


def _worst(schemes: Sequence[SchemeLoss]) -> SchemeLoss:
    return max(schemes, key=lambda loss: loss.loss)


def _width(value: float, largest: float) -> float:
    return round(100 * value / largest, 2)
