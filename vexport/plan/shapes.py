"""Which groups vLLM could not run in their scheme, whole or cut over ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vexport.architectures.fusion import moe_layer
from vexport.formats.partition import Split, is_head, partition_of, uneven
from vexport.formats.schemes import Scheme, get_scheme
from vexport.plan.linears import Names
from vexport.plan.reordered import unsupported_reordering
from vexport.types import Finding, FusionGroup, Json, LinearPlan

# What becomes of layers that do not fit.
SHAPE = "shape"
KEPT = "kept unquantized"
KEY_VALUE = ("k_proj", "v_proj")
# Stored as one weight what vLLM treats as parts of a merged layer.
GATE_AND_UP = ("gate_up_proj", "dense_h_to_4h")
QUERY_KEY_VALUE = ("qkv_proj", "query_key_value", "Wqkv", "W_pack")


def unsupported(
    groups: Iterable[FusionGroup], names: Names, ranks: Sequence[int], text: Mapping[str, Json]
) -> dict[str, str]:
    """Why vLLM could not run groups on all these ranks, by their names; groups that it runs are not there.

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
    """Why vLLM could not run a group on so many ranks, None where it can; None as a scheme is unquantized."""
    split, members = split_of(group, names), _members_on(group, ranks, text)
    if scheme is None:
        return uneven(members, ranks, split)
    return scheme.unsupported_shape(members, ranks=ranks, split=split)


def rank_part(
    group: FusionGroup, names: Names, ranks: int, text: Mapping[str, Json]
) -> tuple[int, int] | None:
    """(out, in) of what one rank holds of a group, None where it cannot be cut."""
    split, members = split_of(group, names), _members_on(group, ranks, text)
    if uneven(members, ranks, split):
        return None
    part = partition_of(members, ranks, split)
    return sum(part.out_features), part.in_features


def _members_on(group: FusionGroup, ranks: int, text: Mapping[str, Json]) -> list[LinearPlan]:
    """The layers that vLLM makes of a group, with keys and values as often as ranks need them."""
    parts = (part for member in group.members for part in _parts(member, text))
    return [repeated(part, ranks, text) for part in parts]


def split_of(group: FusionGroup, names: Names) -> Split:
    """What tensor parallelism cuts of a group's layers in vLLM."""
    last_part = group.name.rpartition(".")[2]
    architecture = names.architecture
    if moe_layer(group.members[0].name) and architecture.experts is not None:
        return "in" if last_part == architecture.experts[1] else "out"
    if last_part in architecture.row_parallel:
        return "in"
    return "none" if last_part in architecture.replicated or is_head(last_part) else "out"


def _parts(member: LinearPlan, text: Mapping[str, Json]) -> tuple[LinearPlan, ...]:
    """The layers that are stored in one weight, by their sizes; the layer itself where it is one."""
    last_part, rows = member.name.rpartition(".")[2], member.out_features
    if last_part in GATE_AND_UP:
        return (replace(member, out_features=rows // 2),) * 2
    queries = query_rows(text)
    if last_part not in QUERY_KEY_VALUE or not 0 < queries < rows:
        return (member,)
    return tuple(replace(member, out_features=part) for part in (queries, *((rows - queries) // 2,) * 2))


def query_rows(text: Mapping[str, Json]) -> int:
    """Heads times their width; 0 where the config does not tell."""
    heads, width, hidden = (text.get(key) for key in ("num_attention_heads", "head_dim", "hidden_size"))
    if not isinstance(heads, int) or heads < 1:
        return 0
    if isinstance(width, int):
        return heads * width
    return hidden if isinstance(hidden, int) else 0


def repeated(member: LinearPlan, ranks: int, text: Mapping[str, Json]) -> LinearPlan:
    """Keys and values of fewer heads than ranks are repeated (QKVParallelLinear, layers/linear.py)."""
    heads = text.get("num_key_value_heads")
    if member.name.endswith(KEY_VALUE) and isinstance(heads, int) and 0 < heads < ranks:
        return replace(member, out_features=member.out_features * ranks // heads)
    return member


def kept_instead(finding: Finding, name: str) -> Finding:
    """What is said of layers that stay unquantized because one of them does not fit."""
    return replace(finding, severity="warning", where=name, fix=KEPT)
