"""The strength with which inputs are smoothed before they are rounded, and the layers that have it."""

from collections.abc import Mapping, Sequence

from vexport.formats.schemes import get_scheme
from vexport.records import FusionGroup, Plan, Smoothing

# The strength that is best for most models (SmoothQuant, arXiv 2211.10438, section 5.1), and on ours.
STRENGTH = 0.5
# Rows of text, spread over all, whose gradients show how channels are smoothed, or how much tokens count.
SMOOTHING_ROWS, WEIGHING_ROWS = 16, 4


def smoothing_strength(groups: Sequence[FusionGroup], asked: float | None, *, has_text: bool) -> float:
    """Return the given strength; without it the default where text was named and some inputs lose much, else
    0.
    """
    if asked is not None:
        return asked if groups else 0.0
    return STRENGTH if has_text and any(map(_gains, groups)) else 0.0


def smoothed_groups(groups: Sequence[FusionGroup]) -> tuple[FusionGroup, ...]:
    """The groups whose inputs lose much, or all where none does: weights have their part of it too."""
    return tuple(filter(_gains, groups)) or tuple(groups)


def smoothing_for(plan: Plan, found: Mapping[str, Smoothing]) -> Mapping[str, Smoothing]:
    """Return the part that a plan asks for of what was found for all candidates, by stored tensor.

    It is what looking for these groups alone would find.
    """
    if not plan.smoothing:
        return {}
    wanted = {member.weight for group in smoothed_groups(plan.groups) for member in group.members}
    folded = {name for name, smoothing in found.items() if not wanted.isdisjoint(smoothing.readers)}
    read = {reader for name in folded for reader in found[name].readers}
    return {
        name: Smoothing(
            rows=smoothing.rows if name in folded else "",
            columns=smoothing.columns if name in read else "",
            readers=smoothing.readers if name in folded else (),
        )
        for name, smoothing in found.items()
        if name in folded | read
    }


def _gains(group: FusionGroup) -> bool:
    """Integers lose what is small next to the largest input of a token, 4 bits what is in a block."""
    inputs = get_scheme(group.scheme).args.input_activations
    if inputs is None or inputs.num_bits > 8:
        return False
    return not inputs.is_float or (inputs.num_bits == 4 and group.rounding != "nearest")
