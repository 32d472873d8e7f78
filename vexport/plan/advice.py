"""What to do about shapes that a scheme does not support: the schemes that do, or keeping the layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from vexport.formats.schemes import get_scheme
from vexport.plan.linears import Names
from vexport.plan.shapes import unsupported
from vexport.types import FusionGroup, Json

# Where a plan's rules come from, and where they are to be changed.
Origin = Literal["options", "scenario"]
# Schemes that need no calibration data and run on usual GPUs: offered in the place of one that does not fit.
OFFERED = ("NVFP4A16", "W4A16", "MXFP4A16", "FP8_DYNAMIC", "W8A8", "W8A16", "FP8_BLOCK")
MOST_OFFERED = 3


def fitting_schemes(
    scheme: str,
    groups: Sequence[FusionGroup],
    names: Names,
    ranks: Sequence[int],
    text: Mapping[str, Json],
) -> tuple[str, ...]:
    """Schemes that all groups of `scheme` fit, those of as many bits first."""
    wanted = get_scheme(scheme).args.weights.num_bits
    ordered = sorted(OFFERED, key=lambda name: abs(get_scheme(name).args.weights.num_bits - wanted))
    own = [group for group in groups if group.scheme == scheme]
    fitting = (
        name
        for name in ordered
        if name != scheme
        and not unsupported((replace(group, scheme=name) for group in own), names, ranks, text)
    )
    return tuple(fitting)[:MOST_OFFERED]


def advice(group: FusionGroup, fitting: Sequence[str], origin: Origin) -> str:
    """What to do about a group of unsupported shape, in the words of the command line or of a scenario."""
    names_in_layer = [member.name.rpartition(".")[2] for member in group.members]
    if origin == "options":
        ignored = " ".join(f"--ignore {name}" for name in names_in_layer)
        scheme, keep = "--scheme", f"--on-unsupported-shape keep, or {ignored}"
    else:
        scheme = "scheme:"
        keep = f"on_unsupported_shape: keep, or a rule with scheme: keep for {' and '.join(names_in_layer)}"
    if not fitting:
        return f"use {keep}"
    return f"use {scheme} {_either(fitting)}, which {'fits' if len(fitting) == 1 else 'fit'}; or {keep}"


def _either(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
