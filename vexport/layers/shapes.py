"""Groups that vLLM could not run in their scheme, whole or cut over ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from vexport.architectures.fusion import looked_up, moe_layer
from vexport.architectures.parts import QUERIES, evaluate, part_sizes
from vexport.formats.partition import Split, is_head, uneven
from vexport.formats.schemes import Scheme, get_scheme
from vexport.layers.linears import Names
from vexport.layers.reordered import unsupported_reordering
from vexport.records import Finding, FusionGroup, Json, LinearPlan

# What becomes of layers that do not fit.
SHAPE = "shape"
KEPT = "kept unquantized"
KEY_VALUE = ("k_proj", "v_proj")
QUERY_KEY_VALUE = ("q_proj", *KEY_VALUE)
# Tensors of a layer that vLLM cuts by whole groups: mamba_v2_sharded_weight_loader in mamba/mamba_mixer2.py.
CUT_BY_GROUPS = ("weight", "weight_scale", "input_scale")


def unsupported(
    groups: Iterable[FusionGroup], names: Names, ranks: Sequence[int], text: Mapping[str, Json]
) -> dict[str, str]:
    """Return why vLLM could not run groups on all these ranks, by their names; groups that it runs are not
    there.

    Groups alike in names and sizes are judged once: a model has few kinds of layers and many of each.
    """
    reasons: dict[str, str] = {}
    judged: dict[tuple[object, ...], str | None] = {}
    for group in groups:
        kind = kind_of_group(group)
        if kind not in judged:
            judged[kind] = _unsupported(group, names, ranks, text)
        reason = judged[kind]
        if reason:
            reasons[group.name] = reason
    return reasons


def kind_of_group(group: FusionGroup) -> tuple[object, ...]:
    """Equal for groups that vLLM runs or refuses alike: names, sizes, scheme, whether they are experts."""
    members = (
        (member.name.rpartition(".")[2], member.out_features, member.in_features) for member in group.members
    )
    routed = moe_layer(group.members[0].name) is not None
    return (group.name.rpartition(".")[2], group.scheme, routed, *members)


def _unsupported(
    group: FusionGroup, names: Names, ranks: Sequence[int], text: Mapping[str, Json]
) -> str | None:
    reordered = unsupported_reordering(group, names.architecture, text)
    if reordered:
        return reordered
    scheme = get_scheme(group.scheme)
    reasons = (unsupported_on(group, scheme, names, count, text) for count in ranks)
    return next((reason for reason in reasons if reason), None)


def refusal(group: FusionGroup, reason: str, fix: str) -> Finding:
    """A refusal that names layers, sizes and rule."""
    return Finding(
        check=SHAPE,
        severity="error",
        where=group.name if len(group.members) > 1 else group.members[0].name,
        expected=f"a shape that {group.scheme} can store and vLLM can run",
        got=reason,
        fix=fix,
    )


def unsupported_on(
    group: FusionGroup, scheme: Scheme | None, names: Names, ranks: int, text: Mapping[str, Json]
) -> str | None:
    """Return why vLLM could not run a group on so many ranks, None where it can; a scheme of None is
    unquantized.
    """
    split, members = split_of(group, names), _members_on(group, names, ranks, text)
    ungrouped = _ungrouped(group, scheme, names, ranks, text)
    if ungrouped:
        return ungrouped
    if scheme is None:
        return uneven(members, ranks, split)
    return scheme.unsupported_shape(members, ranks=ranks, split=split)


def _members_on(group: FusionGroup, names: Names, ranks: int, text: Mapping[str, Json]) -> list[LinearPlan]:
    """The layers that vLLM makes of a group, with keys and values as often as ranks need them."""
    return [repeated(part, ranks, text) for part in parts_of(group, names, text)]


def parts_of(group: FusionGroup, names: Names, text: Mapping[str, Json]) -> list[LinearPlan]:
    """The layers that vLLM makes of a group, also of one that is stored in one weight, and with a part that
    it loads twice (keys that are the values, too)."""
    members = {member.name: member for member in group.members}
    first, rows = group.members[0], sum(member.out_features for member in group.members)
    architecture = names.architecture
    if moe_layer(first.name) is not None or not names.in_decoder(first.name):
        return [*group.members]
    prefix, dot, last_part = group.name.rpartition(".")
    sizes = part_sizes(last_part, rows, architecture, text)
    if _ends(member.out_features for member in group.members) <= _ends(sizes):
        attention = QUERIES in architecture.parts[last_part]
        parts = QUERY_KEY_VALUE if attention else (last_part,) * len(sizes)
        called = [f"{prefix}{dot}{part}" for part in parts]
        return [
            replace(first, name=name, out_features=size) for name, size in zip(called, sizes, strict=True)
        ]
    if QUERIES in architecture.parts.get(last_part, ()):
        for name in looked_up(group.name, tuple(members), architecture):
            members.setdefault(name, replace(group.members[-1], name=name))
    return [*members.values()]


def _ends(sizes: Iterable[int]) -> set[int]:
    """The last row of each part."""
    return {*accumulate(sizes)}


def _ungrouped(
    group: FusionGroup, scheme: Scheme | None, names: Names, ranks: int, text: Mapping[str, Json]
) -> str | None:
    """Return why ranks cannot share the groups of a layer, one of which is repeated for all of them."""
    expression = names.architecture.groups.get(group.name.rpartition(".")[2])
    count = evaluate(expression, text) if expression else 0
    if not count or count % ranks == 0:
        return None
    if count > 1:
        return f"{count} groups, which {ranks} ranks cannot share"
    for spec in scheme.layout(group.members[0], "BF16") if scheme is not None else ():
        last_part, by_row = spec.name.rpartition(".")[2], spec.shape[0] == group.members[0].out_features
        if last_part not in CUT_BY_GROUPS or not by_row:
            return f"{last_part} {list(spec.shape)}, which vLLM does not cut for {ranks} ranks with one group"
    return None


def split_of(group: FusionGroup, names: Names) -> Split:
    """Return the dimension that tensor parallelism cuts of a group's layers in vLLM."""
    last_part = group.name.rpartition(".")[2]
    architecture = names.architecture
    if moe_layer(group.members[0].name) and architecture.experts is not None:
        return "in" if last_part == architecture.experts[1] else "out"
    if last_part in architecture.row_parallel:
        return "in"
    return "none" if last_part in architecture.replicated or is_head(last_part) else "out"


def repeated(member: LinearPlan, ranks: int, text: Mapping[str, Json]) -> LinearPlan:
    """Keys and values of fewer heads than ranks are repeated (QKVParallelLinear, layers/linear.py)."""
    heads = text.get("num_key_value_heads")
    if member.name.endswith(KEY_VALUE) and isinstance(heads, int) and 0 < heads < ranks:
        return replace(member, out_features=member.out_features * ranks // heads)
    return member


def kept_instead(finding: Finding, name: str) -> Finding:
    """Return the finding on layers that stay unquantized because one of them does not fit."""
    return replace(finding, severity="warning", where=name, fix=KEPT)
