"""Find the linear layers that vLLM fuses into one parameter, by their names."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vexport.architectures import NUMBERED_LAYER, Architecture
from vexport.records.patterns import matches

EXPERT = re.compile(r"(?P<layer>.*\bexperts)\.\d+$")
# Output heads. vLLM's ParallelLMHead is not a linear layer and loads weights differently.
HEADS = ("lm_head", "embed_out")
# vLLM's name for the third projection if experts have no gate (compressed_tensors_moe.py).
ABSENT_UP = "None"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayer:
    """Linear layers that vLLM runs as one parameter, by their names in the checkpoint.

    `name` is the name of vLLM's module (`model.layers.0.self_attn.qkv_proj`). `members` are the
    linear layers in vLLM's order. If vLLM does not fuse a linear layer, this layer is the only
    member and has the same name.
    """

    name: str
    members: tuple[str, ...]

    @property
    def projection(self) -> str:
        """Last part of the module's name: `qkv_proj`."""
        return self.name.rpartition(".")[2]

    @property
    def experts(self) -> str | None:
        """Module of routed experts (`model.layers.1.mlp.experts`), or None for other layers."""
        return moe_layer(self.members[0])

    @property
    def is_stored_fused(self) -> bool:
        """True if the checkpoint stores the layer under the name of vLLM's module."""
        return self.name in self.members


def fuse(names: Iterable[str], architecture: Architecture) -> tuple[FusedLayer, ...]:
    """Group linear layers by the module into which vLLM fuses them.

    The fused layers come in the order of their first member. A linear layer could belong to several
    modules, for example to attention with and without a gate. In this case it belongs to the module
    with most members in `names`. If several modules have the same number, it belongs to the module
    with fewest missing members.
    """
    siblings: dict[str, list[str]] = {}
    for name in names:
        prefix, _, leaf = name.rpartition(".")
        siblings.setdefault(prefix, []).append(leaf)
    groups: dict[str, tuple[str, ...]] = {}
    for prefix, leaves in siblings.items():
        owners = _owners(leaves, _modules(prefix, architecture))
        dot = f"{prefix}." if prefix else ""
        for leaf in leaves:
            fused, members = owners.get(leaf, (leaf, (leaf,)))
            groups.setdefault(dot + fused, tuple(dot + member for member in members))
    return tuple(FusedLayer(name=name, members=members) for name, members in groups.items())


def is_head(name: str) -> bool:
    """Return True if the layer with this name is an output head."""
    return name.rpartition(".")[2] in HEADS


def moe_layer(name: str) -> str | None:
    """Return the module of routed experts that contains a layer, or None.

    The name of such a module is `model.layers.1.mlp.experts`.
    """
    match = EXPERT.match(name.rpartition(".")[0])
    return match["layer"] if match else None


def lookup_names(layer: FusedLayer, architecture: Architecture) -> tuple[str, ...]:
    """Return the names by which vLLM's quantization config looks up a fused layer.

    If vLLM looks up the members of the module, these are the names of all its parts. They include
    parts that the checkpoint does not have, for example `v_proj` if the values are the keys.
    """
    if len(layer.members) == 1 or layer.projection not in architecture.resolved:
        return layer.members
    return part_names(layer.name, architecture) or layer.members


def part_names(name: str, architecture: Architecture) -> tuple[str, ...]:
    """Return the names of the linear layers that vLLM's class fuses into a module of this name.

    A class may name a dense module as vLLM names the fused projections of experts (`w13`). The
    module's parts are not parts of experts.
    """
    prefix, dot, projection = name.rpartition(".")
    if moe_layer(name) is not None:
        return ()
    return tuple(f"{prefix}{dot}{part}" for part in architecture.fused.get(projection, ()))


def extra_lookup_entries(
    layer: FusedLayer, entries: Sequence[str], architecture: Architecture
) -> Iterator[str]:
    """Yield one more entry for targets or `ignore` if vLLM would not match `entries` with a layer.

    This can happen if vLLM looks up the layer by another name than the name in the file.
    """
    lookup_name = architecture.name_in_lookup(layer.name)
    renamed = [architecture.renamed_entry(entry) for entry in entries]
    parts = {architecture.name_in_lookup(member) for member in layer.members}
    are_matched = all(any(matches(entry, part) for entry in renamed) for part in parts)
    if layer.experts or are_matched:
        return
    if not any(matches(entry, lookup_name) for entry in renamed):
        holder, dot, _ = layer.name.rpartition(".")
        choices = (f"{holder}{dot}{lookup_name.rpartition('.')[2]}", lookup_name)
        exact = (
            choice
            for choice in choices
            if lookup_name and architecture.renamed_entry(choice) == lookup_name
        )
        yield next(exact, f"re:{re.escape(lookup_name)}$")


def _modules(prefix: str, architecture: Architecture) -> Mapping[str, tuple[str, ...]]:
    """Return the fused modules that may be below a prefix.

    Experts have only the fused module w13.
    """
    if not EXPERT.match(prefix):
        return architecture.fused
    if architecture.experts is None:
        return {"w13": ("gate_proj", "up_proj")}
    gate, _, up = architecture.experts
    return {"w13": (gate, up)} if up else {}


def _owners(
    leaves: list[str], modules: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Map each member of a fused module to (fused module, the module's members in `leaves`).

    All names are the last parts of names. Layers that are not fused are not in the mapping.
    """
    present = set(leaves)
    owners: dict[str, tuple[str, tuple[str, ...]]] = {}
    ranked = sorted(
        (
            (fused, members, [member for member in members if member in present])
            for fused, members in modules.items()
        ),
        key=lambda entry: (-len(entry[2]), len(entry[1])),
    )
    for fused, _, found in ranked:
        if len(found) > 1 and not owners.keys() & set(found):
            owners.update(dict.fromkeys(found, (fused, tuple(found))))
    return owners


def patterns_below(
    module: str, ending: str, architecture: Architecture, others: Iterable[str]
) -> Iterator[str]:
    """Yield patterns for the modules below `module` whose names have this ending.

    The first pattern is for the name in the file. If vLLM's name differs, a second pattern is for
    vLLM's name, because vLLM does not rename patterns. A pattern contains the name from the list of
    layers on (`layers.0...`), which is usually the same in both names. If it would then match any
    of `others`, it contains more of the name.
    """
    for name in dict.fromkeys((module, architecture.vllm_name(module))):
        stack = NUMBERED_LAYER.search(f"{name}.")
        last = stack.start() + stack[0].startswith(".") if stack else 0
        starts = [at for at in range(last, -1, -1) if at == 0 or name[at - 1] == "."]
        tried = (rf".*\b{re.escape(name[at:])}{ending}" for at in starts)
        fitting = (pattern for pattern in tried if not matches_any(pattern, others))
        yield f"re:{next(fitting, re.escape(name) + ending)}"


def all_names(modules: Iterable[str], architecture: Architecture) -> tuple[str, ...]:
    """Return the names of modules in the file, in vLLM, and in vLLM's lookups.

    Routed experts get the name of the first expert.
    """
    names = dict.fromkeys(map(_of_first_expert, modules))
    lookup_name = map(architecture.name_in_lookup, names)
    return tuple(dict.fromkeys((*names, *map(architecture.vllm_name, names), *lookup_name)))


def _of_first_expert(module: str) -> str:
    experts = moe_layer(module)
    return f"{experts}.0.{module.rpartition('.')[2]}" if experts else module


def matches_any(pattern: str, modules: Iterable[str]) -> bool:
    """Return True if a pattern matches the start of any of these names, as vLLM matches it."""
    return any(map(re.compile(pattern).match, modules))
