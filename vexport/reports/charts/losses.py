"""What each group of layers costs when it alone is quantized, as bars."""

from dataclasses import dataclass

from vexport.reports.formatting import size, small
from vexport.types import GroupSensitivity, MixedScheme, SchemeLoss, Sensitivity

# Bars that are drawn; a table has the others.
MAX_GROUPS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBar:
    """One group under its most costly scheme: `width` in per cent of the largest loss."""

    title: str
    scheme: str
    chosen: str
    width: float
    loss: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """One group under one scheme, in words."""

    group: str
    scheme: str
    chosen: bool
    size: str
    measured: str
    estimate: str


def loss_bars(sensitivity: Sensitivity, mixed: MixedScheme | None) -> tuple[LossBar, ...]:
    """The most sensitive groups first, at most MAX_GROUPS."""
    chosen = _chosen(mixed)
    worst = [(group, _worst(group)) for group in sensitivity.groups if group.schemes]
    worst.sort(key=lambda pair: -pair[1].loss)
    largest = max((loss.loss for _, loss in worst), default=0.0) or 1.0
    return tuple(_bar(group, loss, chosen.get(group.name, ""), largest) for group, loss in worst[:MAX_GROUPS])


def loss_rows(sensitivity: Sensitivity, mixed: MixedScheme | None, limit: int) -> tuple[LossRow, ...]:
    """Every group under every scheme, in the model's order, at most `limit`."""
    chosen = _chosen(mixed)
    rows = (
        LossRow(
            group=group.name,
            scheme=loss.scheme,
            chosen=chosen.get(group.name) == loss.scheme,
            size=size(loss.num_bytes),
            measured="" if loss.measured is None else small(loss.measured),
            estimate=small(loss.estimate),
        )
        for group in sensitivity.groups
        for loss in group.schemes
    )
    return tuple(row for _, row in zip(range(limit), rows, strict=False))


def _bar(group: GroupSensitivity, loss: SchemeLoss, chosen: str, largest: float) -> LossBar:
    return LossBar(
        title=group.name,
        scheme=loss.scheme,
        chosen=chosen,
        width=round(100 * max(0.0, loss.loss) / largest, 2),
        loss=small(loss.loss),
        note="estimated" if loss.measured is None else "measured",
    )


def _worst(group: GroupSensitivity) -> SchemeLoss:
    return max(group.schemes, key=lambda loss: loss.loss)


def _chosen(mixed: MixedScheme | None) -> dict[str, str]:
    return {choice.name: choice.scheme for choice in mixed.choices} if mixed else {}
