"""Group sizes for shapes that a scheme's own size does not divide."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from vexport.architectures.fusion import moe_layer
from vexport.formats.schemes import get_scheme, group_sizes, regrouped
from vexport.layers.linears import Names
from vexport.layers.shapes import kept_instead, kind_of_group, refusal, unsupported
from vexport.records import Finding, FusionGroup, Json

# Where a plan's rules come from, and where they are to be changed.
Origin = Literal["options", "scenario"]


def fitting_sizes(
    groups: Sequence[FusionGroup], names: Names, ranks: Sequence[int], text: Mapping[str, Json]
) -> tuple[int, ...]:
    """The sizes below that of the groups' one scheme with which vLLM runs all of them, largest first."""
    return tuple(
        size
        for size in _smaller(groups[0].scheme if groups else "")
        if not unsupported(_regrouped(groups, size), names, ranks, text)
    )


def advice_on(group: FusionGroup, sizes: Sequence[int], origin: Origin) -> str:
    """Return what to do about a group of unsupported shape, in words of options or a scenario; `sizes`
    fit.
    """
    names_in_layer = [member.name.rpartition(".")[2] for member in group.members]
    if origin == "options":
        size, shape = "--group-size", "--on-unsupported-shape"
        rule = " ".join(f"--ignore {name}" for name in names_in_layer)
    else:
        size, shape = "group_size:", "on_unsupported_shape:"
        rule = f"a rule with scheme: keep for {' and '.join(names_in_layer)}"
    keep = f"{shape} keep, or {rule}"
    if not sizes:
        return f"use {keep}, or another scheme (`vexport plan MODEL` shows which fit)"
    fitting = f"{size} {' or '.join(map(str, sizes))}"
    return f"use {fitting}; {shape} smaller-group for these layers alone; or {keep}"


def with_smaller_groups(
    groups: Sequence[FusionGroup], names: Names, ranks: Sequence[int], text: Mapping[str, Json]
) -> tuple[list[FusionGroup], list[Finding]]:
    """Groups of unsupported shape with the largest group size that fits, and what is said of each.

    vLLM loads each fused layer in its own scheme, and the routed experts of a layer in one: so the size is
    chosen for those. What no size fits stays as it is.
    """
    reasons = unsupported(groups, names, ranks, text)
    sizes: dict[tuple[object, ...], int | None] = {}
    regrouped_groups: list[FusionGroup] = []
    notes: list[Finding] = []
    for name, layers in layers_alone(groups):
        bad = next((group for group in layers if group.name in reasons), None)
        kind = tuple(kind_of_group(group) for group in layers)
        if bad is not None and kind not in sizes:
            sizes[kind] = next(iter(fitting_sizes(layers, names, ranks, text)), None)
        size = sizes.get(kind) if bad is not None else None
        if bad is None or size is None:
            regrouped_groups.extend(layers)
            continue
        regrouped_groups.extend(_regrouped(layers, size))
        note = kept_instead(refusal(bad, reasons[bad.name], ""), name)
        notes.append(replace(note, fix=f"quantized in groups of {size} ({regrouped_groups[-1].scheme})"))
    return regrouped_groups, notes


def layers_alone(groups: Sequence[FusionGroup]) -> Iterator[tuple[str, list[FusionGroup]]]:
    """Return the layers that vLLM takes one scheme for: a fused layer, or all routed experts of a layer, by
    name.
    """
    units: dict[str, list[FusionGroup]] = {}
    for group in groups:
        units.setdefault(moe_layer(group.members[0].name) or group.name, []).append(group)
    yield from units.items()


def _smaller(scheme: str) -> tuple[int, ...]:
    group_size = get_scheme(scheme).args.weights.group if scheme else None
    return tuple(size for size in group_sizes(scheme) if size < group_size) if group_size else ()


def _regrouped(groups: Sequence[FusionGroup], size: int) -> list[FusionGroup]:
    return [replace(group, scheme=regrouped(get_scheme(group.scheme), size).name) for group in groups]
