"""What to do about shapes that a scheme does not support: the schemes that do, or keeping the layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from vexport.formats.schemes import get_scheme
from vexport.plan.group_sizes import fitting_sizes
from vexport.plan.linears import Names
from vexport.plan.shapes import unsupported
from vexport.types import FusionGroup, Json

# Where a plan's rules come from, and where they are to be changed.
Origin = Literal["options", "scenario"]
# Schemes that need no calibration data and run on usual GPUs: offered in the place of one that does not fit.
OFFERED = ("NVFP4A16", "W4A16", "MXFP4A16", "FP8_DYNAMIC", "W8A8", "W8A16", "FP8_BLOCK")
MOST_OFFERED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What fits all layers of a scheme: its own group sizes, largest first, or other schemes."""

    sizes: tuple[int, ...]
    schemes: tuple[str, ...]

    def on(self, group: FusionGroup, origin: Origin) -> str:
        """What to do about a group of unsupported shape, in the words of options or of a scenario."""
        names_in_layer = [member.name.rpartition(".")[2] for member in group.members]
        if origin == "options":
            size, scheme, shape = "--group-size", "--scheme", "--on-unsupported-shape"
            rule = " ".join(f"--ignore {name}" for name in names_in_layer)
        else:
            size, scheme, shape = "group_size:", "scheme:", "on_unsupported_shape:"
            rule = f"a rule with scheme: keep for {' and '.join(names_in_layer)}"
        keep = f"{shape} keep, or {rule}"
        if self.sizes:
            fitting = f"{size} {_either([str(size) for size in self.sizes])}"
            return f"use {fitting}; {shape} smaller-group for these layers alone; or {keep}"
        if not self.schemes:
            return f"use {keep}"
        verb = "fits" if len(self.schemes) == 1 else "fit"
        return f"use {scheme} {_either(self.schemes)}, which {verb}; or {keep}"


def advice_on(
    scheme: str,
    groups: Sequence[FusionGroup],
    names: Names,
    ranks: Sequence[int],
    text: Mapping[str, Json],
) -> Advice:
    """What fits all groups of `scheme`: group sizes, and schemes, those of as many bits first."""
    wanted = get_scheme(scheme).args.weights.num_bits
    ordered = sorted(OFFERED, key=lambda name: abs(get_scheme(name).args.weights.num_bits - wanted))
    own = [group for group in groups if group.scheme == scheme]
    fitting = (
        name
        for name in ordered
        if name != scheme
        and not unsupported((replace(group, scheme=name) for group in own), names, ranks, text)
    )
    return Advice(sizes=fitting_sizes(own, names, ranks, text), schemes=tuple(islice(fitting, MOST_OFFERED)))


def _either(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
