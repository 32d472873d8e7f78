"""Which config group vLLM gives a layer, and which layers it leaves alone, by their names.

Sources: `_quantization_scheme_map_from_config` and `get_scheme_dict` in vLLM's compressed_tensors.py,
`find_matched_target` and `should_ignore_layer` in compressed_tensors/utils.py, `find_matching_patterns` in
quantization/utils/config_utils.py, `get_moe_method` in compressed_tensors_moe.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vexport.architectures import Architecture
from vexport.architectures.fusion import moe_layer
from vexport.checks.vllm.arguments import ConfigGroup
from vexport.formats.partition import is_head
from vexport.types.patterns import REGEX, Patterns, matches

HEAD_CLASS = "ParallelLMHead"
EMBEDDING_CLASS = "VocabParallelEmbedding"
EXPERTS_CLASS = "RoutedExperts"
# Stands for routed experts too, in this spelling only (_add_fused_moe_to_target_scheme_map).
LINEAR = "Linear"
EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.[^.]+$)")
Targets = Mapping[str, ConfigGroup]


def targets_of(groups: Iterable[ConfigGroup]) -> Targets:
    """The targets in vLLM's order: one that is named again keeps its place and takes the later group."""
    return {target: group for group in groups for target in group.targets}


def lookup_name(name: str) -> str:
    """The name that vLLM looks for: of all experts of a layer it asks for the first one's group only."""
    return EXPERT_NUMBER.sub("0", name)


def ignored(
    fused: str,
    members: Sequence[str],
    ignore: Sequence[str],
    architecture: Architecture,
) -> Iterator[str]:
    """The members of a fused layer that `ignore` names, or all where it names that."""
    projection = fused.rpartition(".")[2]
    if fused not in members and matches_any(fused, ignore) and moe_layer(members[0]) is None:
        yield from members
    elif _are_resolved(projection, members, architecture):
        yield from (member for member in members if matches_any(lookup_name(member), ignore))


def group_for(
    fused: str, members: Sequence[str], targets: Targets, architecture: Architecture, *, table: bool
) -> ConfigGroup | None:
    """The config group of a layer that is not ignored: by its name, by all members' names, by its class."""
    projection, routed = fused.rpartition(".")[2], moe_layer(members[0]) is not None
    group = None if routed else _first(fused, targets)
    if group is None and _are_resolved(projection, members, architecture):
        owners = [_first(lookup_name(member), targets) for member in members]
        group = owners[0] if all(owners) else None
    if group is not None:
        return group
    if routed and LINEAR in targets and EXPERTS_CLASS not in targets:
        targets = {**targets, EXPERTS_CLASS: targets[LINEAR]}
    kind = EMBEDDING_CLASS if table else _class_of(projection, members, architecture)
    return _of_class(kind, targets)


def group_for_table(targets: Targets) -> ConfigGroup | None:
    """The config group of a table of embeddings that its model builds without a name."""
    return _of_class(EMBEDDING_CLASS, targets)


def _are_resolved(projection: str, members: Sequence[str], architecture: Architecture) -> bool:
    """Whether vLLM looks for the members' names: it does not know those of every fused layer."""
    alone = len(members) == 1 or moe_layer(members[0]) is not None
    return alone or projection in architecture.resolved


def _first(name: str, targets: Targets) -> ConfigGroup | None:
    return next((group for target, group in targets.items() if matches(target, name)), None)


def _of_class(name: str, targets: Targets) -> ConfigGroup | None:
    """By a class name's part, in any case, or by a pattern that matches it."""
    for target, group in targets.items():
        if matches(target, name) if target.startswith(REGEX) else target.lower() in name.lower():
            return group
    return None


def _class_of(projection: str, members: Sequence[str], architecture: Architecture) -> str:
    """The name of vLLM's class of a layer, as far as its name tells."""
    if is_head(projection):
        return HEAD_CLASS
    if moe_layer(members[0]) is not None:
        return EXPERTS_CLASS
    if projection in architecture.row_parallel:
        return "RowParallelLinear"
    if projection in architecture.replicated:
        return "ReplicatedLinear"
    if projection == "qkv_proj":
        return "QKVParallelLinear"
    return "MergedColumnParallelLinear" if len(members) > 1 else "ColumnParallelLinear"


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name equals a pattern or matches an `re:` pattern from its start, as in vLLM."""
    if isinstance(patterns, Patterns):
        return patterns.match(name)
    return any(matches(pattern, name) for pattern in patterns)
