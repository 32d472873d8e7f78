"""Which groups get more bits when a checkpoint fails: those of most loss first, in few rounds."""

from collections.abc import Mapping, Sequence

from vexport.formats.schemes import KEEP
from vexport.sensitivity.layer_groups import LADDER
from vexport.types import GroupSensitivity, Promotion


def next_promotions(
    groups: Sequence[GroupSensitivity], schemes: Mapping[str, str], number: int
) -> tuple[Promotion, ...]:
    """What to promote in round `number` (from 1), given the scheme of every group; none where all is kept.

    The groups of most loss go up row step at a time until the predicted loss is 4^-number of what it was:
    a quarter, then a sixteenth of that, then a 64th, so that three rounds leave a four-thousandth.
    """
    now = dict(schemes)
    target = sum(loss_of(group, now[group.name]) for group in groups) * 0.25**number
    while sum(loss_of(group, now[group.name]) for group in groups) > target:
        movable = [group for group in groups if now[group.name] != KEEP]
        worst = max(movable, key=lambda group: loss_of(group, now[group.name]))
        now[worst.name] = _next_step(worst, now[worst.name])
    return tuple(
        _promotion(group, schemes[group.name], now[group.name])
        for group in groups
        if now[group.name] != schemes[group.name]
    )


def loss_of(group: GroupSensitivity, scheme: str) -> float:
    """Nats per token in a scheme, 0 where the group is kept."""
    return max(0.0, next((row.loss for row in group.schemes if row.scheme == scheme), 0.0))


def bytes_of(group: GroupSensitivity, scheme: str) -> int:
    """What a group takes in a scheme."""
    return next((row.num_bytes for row in group.schemes if row.scheme == scheme), group.source_bytes)


def _next_step(group: GroupSensitivity, scheme: str) -> str:
    """The first step of the ladder that takes more bytes and loses less."""
    has = {row.scheme for row in group.schemes} | {KEEP}
    return next(
        step
        for step in LADDER
        if step in has
        and (
            step == KEEP
            or bytes_of(group, step) > bytes_of(group, scheme)
            and loss_of(group, step) < loss_of(group, scheme)
        )
    )


def _promotion(group: GroupSensitivity, before: str, after: str) -> Promotion:
    return Promotion(
        name=group.name,
        before=before,
        after=after,
        num_bytes=bytes_of(group, after) - bytes_of(group, before),
        loss=loss_of(group, before) - loss_of(group, after),
    )
