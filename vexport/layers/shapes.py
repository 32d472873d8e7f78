"""Layers that a scheme, vLLM's own order of their rows, or a number of ranks does not fit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate

from vexport.architectures import Reordering
from vexport.architectures.config import QUERIES, known_size, part_sizes
from vexport.architectures.fusion import FusedLayer, is_head, looked_up, moe_layer
from vexport.architectures.linears import Names, makes_keys
from vexport.formats.base import Split, uneven
from vexport.formats.plan import FusionGroup
from vexport.formats.schemes import Scheme
from vexport.records import Finding, Json, LinearPlan, TensorSpec

WEIGHTS = ("weight", "weight_packed")
# The treatment of layers that do not fit.
SHAPE = "shape"
KEPT = "kept unquantized"
KEY_VALUE = ("k_proj", "v_proj")
QUERY_KEY_VALUE = ("q_proj", *KEY_VALUE)
# Tensors of a layer that vLLM cuts by whole groups: mamba_v2_sharded_weight_loader in
# mamba/mamba_mixer2.py.
CUT_BY_GROUPS = ("weight", "weight_scale", "input_scale")
# The rank counts that are offered instead of one that does not work.
MOST_RANKS = 16
OTHER_RANKS = "serve it on another number of GPUs (--tp)"


def unsupported_reordering(
    members: Sequence[LinearPlan], scheme: Scheme, names: Names
) -> str | None:
    """Return why the stored tensors cannot follow vLLM's order of rows, or None if they can."""
    width = known_size("hidden_size // num_attention_heads", names.text)
    for member in members:
        last_part = member.name.rpartition(".")[2]
        reordering = names.architecture.reordered.get(last_part)
        for spec in scheme.layout(member, "BF16") if reordering else ():
            if reordering and (reason := _left_behind(reordering, member, spec, width)):
                return f"{spec.name.rpartition('.')[2]} {list(spec.shape)} of {last_part}, {reason}"
    return None


def _left_behind(
    reordering: Reordering, member: LinearPlan, spec: TensorSpec, head_size: int
) -> str | None:
    """Return why vLLM would load one of a layer's tensors wrongly or not at all, or None;
    `head_size` is 0 if unknown.

    Sources in vllm/model_executor/models: permute_qk_weight_for_rotary of llama4.py (scales by
    row), _repack_qkv of bloom.py and _split_key_value of telechat2.py (every tensor),
    K2HorizonModel.load_weights of k2_horizon.py (plain weight), _transpose_conv1d of gpt2.py, which
    turns what is called weight, packed or not (transposed). FalconModel.load_weights of falcon.py
    (whole heads) cuts each tensor whose parameter has an output dimension: all but scales of the
    tensor and shapes.
    """
    last_part, rows = spec.name.rpartition(".")[2], spec.shape[0]
    by_row = rows == member.out_features
    if reordering == "scales by row":
        follows = last_part in (*WEIGHTS, "weight_scale") and by_row
        moves = spec.shape == (1,) or last_part == "weight_shape" or follows
        return None if moves else "whose rows vLLM reorders without it"
    if reordering == "every tensor":
        reason = f"of which vLLM takes each tensor for {member.out_features} rows and reorders them"
        return None if by_row else reason
    if reordering == "whole heads":
        whole = member.out_features % rows == 0 and head_size % (member.out_features // rows) == 0
        moves = len(spec.shape) == 1 or whole and head_size > 0
        return None if moves else f"whose rows vLLM reorders by heads of {head_size}"
    if reordering == "plain weight":
        return "whose rows vLLM reorders only where it is not quantized"
    reason = "which vLLM turns around when it loads it; take a scheme that stores weight_packed"
    return reason if last_part == "weight" else None


def unsupported(
    groups: Iterable[FusionGroup], names: Names, ranks: Sequence[int]
) -> dict[str, str]:
    """Return why vLLM could not run groups on all these ranks, by their names; groups that it runs
    are not there.

    Groups alike in names and sizes are judged once: a model has few kinds of layers and many of
    each.
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
    """Equal for groups that vLLM runs or refuses alike: names, sizes, scheme, whether they are
    experts.
    """
    members = (
        (member.name.rpartition(".")[2], member.out_features, member.in_features)
        for member in group.members
    )
    routed = moe_layer(group.members[0].name) is not None
    return (group.name.rpartition(".")[2], group.scheme.name, routed, *members)


def _unsupported(group: FusionGroup, names: Names, ranks: Sequence[int]) -> str | None:
    if reordered := unsupported_reordering(group.members, group.scheme, names):
        return reordered
    for count in ranks:
        reason = unsupported_on(group.layer, group.members, group.scheme, names, count)
        if reason:
            return reason
    return None


def refusal(group: FusionGroup, reason: str, fix: str) -> Finding:
    """A refusal that names layers, sizes and rule."""
    where = group.name if len(group.members) > 1 else group.members[0].name
    return _refusal(
        where,
        f"a shape that {group.scheme.name} can store and vLLM can run",
        reason,
        fix,
        check=SHAPE,
    )


def unsupported_on(
    layer: FusedLayer,
    members: Sequence[LinearPlan],
    scheme: Scheme | None,
    names: Names,
    ranks: int,
) -> str | None:
    """Return why vLLM could not run a fused layer on so many ranks, or None if it can.

    `members` are the layer's linear layers with their sizes. A scheme of None stands for an
    unquantized layer.
    """
    if ungrouped := _ungrouped(layer, members, scheme, names, ranks):
        return ungrouped
    split = split_of(layer, names)
    # Each rank needs whole heads of keys and values, so vLLM repeats them if there are too few.
    parts = [repeated(part, ranks, names.text) for part in parts_of(layer, members, names)]
    if scheme is None:
        return uneven(parts, ranks, split)
    return scheme.unsupported_shape(parts, ranks=ranks, split=split)


def parts_of(layer: FusedLayer, members: Sequence[LinearPlan], names: Names) -> list[LinearPlan]:
    """Return the parts that vLLM fuses into a layer, with their sizes.

    A weight that is stored fused is cut into its parts. A part that vLLM loads twice (keys that
    are the values, too) is there twice.
    """
    architecture = names.architecture
    first = members[0]
    if layer.experts is not None or not names.in_decoder(first.name):
        return [*members]
    prefix, dot, _ = layer.name.rpartition(".")
    projection = layer.projection
    rows = sum(member.out_features for member in members)
    sizes = part_sizes(projection, rows, architecture, names.text)
    if _ends(member.out_features for member in members) <= _ends(sizes):
        is_attention = QUERIES in architecture.parts[projection]
        parts = QUERY_KEY_VALUE if is_attention else (projection,) * len(sizes)
        return [
            replace(first, name=f"{prefix}{dot}{part}", out_features=size)
            for part, size in zip(parts, sizes, strict=True)
        ]
    by_name = {member.name: member for member in members}
    if QUERIES in architecture.parts.get(projection, ()):
        for name in looked_up(layer, architecture):
            by_name.setdefault(name, replace(members[-1], name=name))
    return [*by_name.values()]


def _ends(sizes: Iterable[int]) -> set[int]:
    """The last row of each part."""
    return {*accumulate(sizes)}


def _ungrouped(
    layer: FusedLayer,
    members: Sequence[LinearPlan],
    scheme: Scheme | None,
    names: Names,
    ranks: int,
) -> str | None:
    """Return why ranks cannot share the groups of a layer, or None if they can.

    A single group is repeated for all ranks.
    """
    expression = names.architecture.groups.get(layer.projection)
    count = known_size(expression, names.text) if expression else 0
    if not count or count % ranks == 0:
        return None
    if count > 1:
        return f"{count} groups, which {ranks} ranks cannot share"
    for spec in scheme.layout(members[0], "BF16") if scheme is not None else ():
        last_part = spec.name.rpartition(".")[2]
        by_row = spec.shape[0] == members[0].out_features
        if last_part not in CUT_BY_GROUPS or not by_row:
            return (
                f"{last_part} {list(spec.shape)}, which vLLM does not cut for {ranks} ranks "
                f"with one group"
            )
    return None


def split_of(layer: FusedLayer, names: Names) -> Split:
    """Return the dimension of a fused layer that tensor parallelism cuts in vLLM."""
    architecture = names.architecture
    projection = layer.projection
    if layer.experts and architecture.experts is not None:
        return "in" if projection == architecture.experts[1] else "out"
    if projection in architecture.row_parallel:
        return "in"
    return "none" if projection in architecture.replicated or is_head(projection) else "out"


def repeated(member: LinearPlan, ranks: int, text: Mapping[str, Json]) -> LinearPlan:
    """Keys and values of fewer heads than ranks are repeated (QKVParallelLinear,
    layers/linear.py).
    """
    heads = text.get("num_key_value_heads")
    if member.name.endswith(KEY_VALUE) and isinstance(heads, int) and 0 < heads < ranks:
        return replace(member, out_features=member.out_features * ranks // heads)
    return member


def kept_instead(finding: Finding, name: str) -> Finding:
    """Return the finding on layers that stay unquantized because one of them does not fit."""
    return replace(finding, severity="warning", where=name, fix=KEPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The number of attention heads of a model, and of its keys and values; 0 where that is not
    known.
    """

    queries: int
    keys: int

    def uneven(self, ranks: int) -> str | None:
        """Return why the heads cannot be cut for so many ranks: `9 attention heads`; None where
        they can.

        Sources: ModelConfig.verify_with_parallel_config (vllm/config/model.py); the attention of
        every model class, which asserts that key and value heads can be cut, or repeated.
        """
        if self.queries % ranks:
            return f"{self.queries} attention heads"
        if self.keys and self.keys % ranks and ranks % self.keys:
            return f"{self.keys} key and value heads"
        return None

    @property
    def possible_ranks(self) -> str:
        """The tensor parallel sizes that the heads allow, as a person lists them: `1, 3 or 9`."""
        fitting = [str(ranks) for ranks in range(1, MOST_RANKS + 1) if self.uneven(ranks) is None]
        *first, last = fitting
        return f"{', '.join(first)} or {last}" if first else last


def heads_of(linears: Iterable[str], names: Names) -> Heads:
    """The heads of a model, from the names of its linear layers and the language model's config."""
    queries = known_size("num_attention_heads", names.text)
    has_keys = queries > 0 and any(makes_keys(name, names) for name in linears)
    return Heads(
        queries=queries, keys=known_size("num_key_value_heads", names.text) if has_keys else 0
    )


def refused_ranks(
    layers: Sequence[FusedLayer],
    linears: Mapping[str, LinearPlan],
    quantized: Set[str],
    names: Names,
    ranks: Sequence[int],
) -> Iterator[Finding]:
    """Refusals for the rank counts that the heads, or layers that are not `quantized`, do not
    allow.
    """
    several = [count for count in ranks if count > 1]
    if not several or not names.architecture.row_parallel:
        return
    heads = heads_of(linears, names)
    for count in several:
        if uneven := heads.uneven(count):
            fix = f"serve it on {heads.possible_ranks} GPUs (--tp)"
            yield _refusal(
                f"config.json (tp {count})", f"heads that {count} ranks can share", uneven, fix
            )
            continue
        for layer in layers:
            if quantized.isdisjoint(layer.members) and names.place(layer.members[0]) == "decoder":
                members = [linears[member] for member in layer.members]
                if reason := unsupported_on(layer, members, None, names, count):
                    yield _refusal(layer.name, "parts that each rank can hold", reason, OTHER_RANKS)


def is_uneven(group: FusionGroup, names: Names, ranks: Sequence[int]) -> bool:
    """Return whether vLLM could not cut a group for some of the ranks in any scheme, nor
    unquantized.
    """
    several = [count for count in ranks if count > 1]
    return any(unsupported_on(group.layer, group.members, None, names, count) for count in several)


def _refusal(where: str, expected: str, got: str, fix: str, *, check: str = "ranks") -> Finding:
    return Finding(check=check, severity="error", where=where, expected=expected, got=got, fix=fix)
