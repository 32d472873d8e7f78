"""Fused layers of a plan that vLLM could not run, and their refusals."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from vexport.architectures.fusion import FusedLayer, moe_layer
from vexport.architectures.linears import Names
from vexport.architectures.ranks import heads_of
from vexport.formats.plan import FusionGroup
from vexport.formats.shapes import unsupported_on, unsupported_reordering
from vexport.records import Finding, LinearPlan
from vexport.rules import ranks as ranks_rules
from vexport.rules.shape import UNSUPPORTED

# Name of the check in refusals of a shape.
SHAPE = "shape"
# Remedy in notes on layers that do not fit.
KEPT = "kept unquantized"
NO_EXPERTS = "vLLM does not run routed experts in this scheme"
RANKS_ADVICE = "serve it on another number of GPUs (--tp)"


def unsupported(
    groups: Iterable[FusionGroup], names: Names, ranks: Sequence[int]
) -> dict[str, str]:
    """Return the reason for each group that vLLM cannot run, by the group's name.

    A group must run on every number of ranks in `ranks`. Groups of the same kind are checked once.
    """
    reasons: dict[str, str] = {}
    judged: dict[tuple[object, ...], str | None] = {}
    for group in groups:
        kind = kind_of_group(group)
        if kind not in judged:
            judged[kind] = _unsupported(group, names, ranks)
        if reason := judged[kind]:
            reasons[group.name] = reason
    return reasons


def kind_of_group(group: FusionGroup) -> tuple[object, ...]:
    """Return a key that is equal for groups that vLLM runs or refuses alike.

    The key contains the names, the sizes and the scheme, and whether the layers are routed experts.
    """
    members = (
        (member.name.rpartition(".")[2], member.out_features, member.in_features)
        for member in group.members
    )
    is_routed = moe_layer(group.members[0].name) is not None
    return (group.name.rpartition(".")[2], group.scheme.name, is_routed, *members)


def _unsupported(group: FusionGroup, names: Names, ranks: Sequence[int]) -> str | None:
    if reordered := unsupported_reordering(group.members, group.scheme, names):
        return reordered
    for count in ranks:
        reason = unsupported_on(group.layer, group.members, group.scheme, names, count)
        if reason:
            return reason
    is_routed = moe_layer(group.members[0].name) is not None
    if is_routed and not group.scheme.format.runs_experts(group.scheme.args):
        return NO_EXPERTS
    return None


def refusal(group: FusionGroup, reason: str, fix: str) -> Finding:
    """Return the refusal of a group. `reason` is a sentence with the sizes and vLLM's rule."""
    where = group.name if len(group.members) > 1 else group.members[0].name
    return Finding.at(UNSUPPORTED, where, reason=reason, advice=fix)


def kept_note(finding: Finding, name: str) -> Finding:
    """Return the refusal of a group as a warning that all layers in `name` are kept.

    `name` is a fused layer, or a module with all its routed experts.
    """
    return replace(finding, severity="warning", where=name, fix=KEPT)


def refused_ranks(
    layers: Sequence[FusedLayer],
    linears: Mapping[str, LinearPlan],
    quantized: Set[str],
    names: Names,
    ranks: Sequence[int],
) -> Iterator[Finding]:
    """Yield refusals for numbers of ranks that cannot divide the heads or unquantized layers."""
    several = [count for count in ranks if count > 1]
    if not several or not names.architecture.row_parallel:
        return
    heads = heads_of(linears, names)
    for count in several:
        if uneven := heads.uneven(count):
            yield Finding.at(
                ranks_rules.HEADS,
                f"config.json (tp {count})",
                reason=uneven,
                ranks=count,
                possible=heads.possible_gpus,
            )
            continue
        for layer in layers:
            if quantized.isdisjoint(layer.members) and names.place(layer.members[0]) == "decoder":
                members = [linears[member] for member in layer.members]
                if reason := unsupported_on(layer, members, None, names, count):
                    yield Finding.at(
                        ranks_rules.UNQUANTIZED_LAYER,
                        layer.name,
                        reason=reason,
                        advice=RANKS_ADVICE,
                    )


def cannot_be_split(group: FusionGroup, names: Names, ranks: Sequence[int]) -> bool:
    """Return True if vLLM could not split a group between ranks even if it is unquantized."""
    several = [count for count in ranks if count > 1]
    return any(unsupported_on(group.layer, group.members, None, names, count) for count in several)
