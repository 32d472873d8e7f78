"""Split fused layers into parts, and check how tensor parallelism splits them over ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from vexport.architectures.config import QUERIES, known_size, part_sizes
from vexport.architectures.fusion import FusedLayer, is_head, lookup_names
from vexport.architectures.linears import Names, is_key_projection
from vexport.records import Json, LinearPlan

# The dimension that tensor parallelism splits: out_features (column-parallel), in_features
# (row-parallel) or none.
Split = Literal["out", "in", "none"]
KEY_VALUE = ("k_proj", "v_proj")
QUERY_KEY_VALUE = ("q_proj", *KEY_VALUE)
# Largest tensor parallel size that messages suggest.
MAX_RANKS = 16


def parts_of(layer: FusedLayer, members: Sequence[LinearPlan], names: Names) -> list[LinearPlan]:
    """Return the parts that vLLM fuses into a layer, with their sizes.

    A weight that is stored fused is split into its parts. If vLLM loads a part twice (keys that are
    also the values), the part is returned twice.
    """
    architecture = names.architecture
    first = members[0]
    if layer.experts is not None or not names.in_decoder(first.name):
        return [*members]
    prefix, dot, _ = layer.name.rpartition(".")
    projection = layer.projection
    rows = sum(member.out_features for member in members)
    sizes = part_sizes(projection, rows, architecture, names.text)
    # Check whether each stored weight consists of complete parts.
    if _ends(member.out_features for member in members) <= _ends(sizes):
        is_attention = QUERIES in architecture.parts[projection]
        parts = QUERY_KEY_VALUE if is_attention else (projection,) * len(sizes)
        return [
            replace(first, name=f"{prefix}{dot}{part}", out_features=size)
            for part, size in zip(parts, sizes, strict=True)
        ]
    by_name = {member.name: member for member in members}
    if QUERIES in architecture.parts.get(projection, ()):
        for name in lookup_names(layer, architecture):
            by_name.setdefault(name, replace(members[-1], name=name))
    return [*by_name.values()]


def _ends(sizes: Iterable[int]) -> set[int]:
    return {*accumulate(sizes)}


def split_of(layer: FusedLayer, names: Names) -> Split:
    """Return the dimension along which vLLM's tensor parallelism splits a fused layer."""
    architecture = names.architecture
    projection = layer.projection
    if layer.experts and architecture.experts is not None:
        return "in" if projection == architecture.experts.down else "out"
    if projection in architecture.row_parallel:
        return "in"
    return "none" if projection in architecture.replicated or is_head(projection) else "out"


def on_all_ranks(member: LinearPlan, ranks: int, text: Mapping[str, Json]) -> LinearPlan:
    """Return a layer with the total out_features of all ranks.

    If a model has fewer KV heads than ranks, vLLM copies the heads of keys and values to several
    ranks (QKVParallelLinear). All other layers are returned unchanged.
    """
    heads = text.get("num_key_value_heads")
    if member.name.endswith(KEY_VALUE) and isinstance(heads, int) and 0 < heads < ranks:
        return replace(member, out_features=member.out_features * ranks // heads)
    return member


def uneven(members: Sequence[LinearPlan], ranks: int, split: Split) -> str | None:
    """Return why linear layers cannot be split evenly among the ranks, or None if they can.

    Source: `divide` in vllm/distributed/utils.py.
    """
    for member in members if split != "none" else ():
        size = member.out_features if split == "out" else member.in_features
        if size % ranks:
            return f"{split}_features {size} is not a multiple of {ranks} ranks"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Numbers of attention heads and of key and value heads. 0 if they are unknown."""

    queries: int
    keys: int

    def uneven(self, ranks: int) -> str | None:
        """Return the heads that cannot be split among the ranks (`9 attention heads`), or None.

        Sources: ModelConfig.verify_with_parallel_config (vllm/config/model.py); the attention of
        every model class, which asserts that key and value heads can be split or repeated.
        """
        if self.queries % ranks:
            return f"{self.queries} attention heads"
        if self.keys and self.keys % ranks and ranks % self.keys:
            return f"{self.keys} key and value heads"
        return None

    @property
    def possible_ranks(self) -> str:
        """Tensor parallel sizes that the heads allow, as text: `1, 3 or 9`."""
        fitting = [str(ranks) for ranks in range(1, MAX_RANKS + 1) if self.uneven(ranks) is None]
        *first, last = fitting
        return f"{', '.join(first)} or {last}" if first else last

    @property
    def possible_gpus(self) -> str:
        """Numbers of GPUs that the heads allow, as text: `1 GPU`, or `1, 3 or 9 GPUs`."""
        return f"{self.possible_ranks} {'GPU' if self.possible_ranks == '1' else 'GPUs'}"


def heads_of(linears: Iterable[str], names: Names) -> Heads:
    """Return a model's heads from the names of its linear layers and its text config."""
    queries = known_size("num_attention_heads", names.text)
    has_keys = queries > 0 and any(is_key_projection(name, names) for name in linears)
    keys = known_size("num_key_value_heads", names.text) if has_keys else 0
    return Heads(queries=queries, keys=keys)
