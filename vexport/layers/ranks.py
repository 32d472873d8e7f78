"""On how many GPUs vLLM can run a model at all, whatever is quantized: heads, and layers that stay 16 bit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from vexport.layers.kv_cache import makes_keys
from vexport.layers.linears import Names
from vexport.layers.shapes import unsupported_on
from vexport.records import Finding, FusionGroup, Json, LinearPlan

# The rank counts that are offered instead of one that does not work.
MOST_RANKS = 16
OTHER_RANKS = "serve it on another number of GPUs (--tp)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The number of attention heads of a model, and of its keys and values; 0 where that is not known."""

    queries: int
    keys: int

    def uneven(self, ranks: int) -> str | None:
        """Return why the heads cannot be cut for so many ranks: `9 attention heads`; None where they can.

        Sources: ModelConfig.verify_with_parallel_config (vllm/config/model.py); the attention of every model
        class, which asserts that key and value heads can be cut, or repeated.
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


def heads_of(linears: Iterable[str], names: Names, text: Mapping[str, Json]) -> Heads:
    """The heads of a model, from the names of its linear layers and the language model's config."""
    queries, keys = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if not isinstance(queries, int) or queries < 1:
        return Heads(queries=0, keys=0)
    if not isinstance(keys, int) or keys < 1 or not any(makes_keys(name, names) for name in linears):
        return Heads(queries=queries, keys=0)
    return Heads(queries=queries, keys=keys)


def refused_ranks(
    modules: Mapping[str, tuple[str, ...]],
    linears: Mapping[str, LinearPlan],
    quantized: Set[str],
    names: Names,
    ranks: Sequence[int],
    text: Mapping[str, Json],
) -> Iterator[Finding]:
    """Refusals for the rank counts that the heads, or layers that are not `quantized`, do not allow."""
    several = [count for count in ranks if count > 1]
    if not several or not names.architecture.row_parallel:
        return
    heads = heads_of(linears, names, text)
    for count in several:
        uneven = heads.uneven(count)
        if uneven:
            fix = f"serve it on {heads.possible_ranks} GPUs (--tp)"
            yield _refusal(f"config.json (tp {count})", f"heads that {count} ranks can share", uneven, fix)
            continue
        for name, members in modules.items():
            if quantized.isdisjoint(members) and names.place(members[0]) == "decoder":
                group = FusionGroup(
                    name=name, scheme="", observer="", members=tuple(linears[member] for member in members)
                )
                reason = unsupported_on(group, None, names, count, text)
                if reason:
                    yield _refusal(name, "parts that each rank can hold", reason, OTHER_RANKS)


def is_uneven(group: FusionGroup, names: Names, ranks: Sequence[int], text: Mapping[str, Json]) -> bool:
    """Return whether vLLM could not cut a group for some of the ranks in any scheme, nor unquantized."""
    return any(unsupported_on(group, None, names, count, text) for count in ranks if count > 1)


def _refusal(where: str, expected: str, got: str, fix: str) -> Finding:
    return Finding(check="ranks", severity="error", where=where, expected=expected, got=got, fix=fix)
