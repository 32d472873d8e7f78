"""The layers of a checkpoint that vLLM runs as one, by their names alone."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vexport.architectures import STACK, Architecture
from vexport.records.patterns import matches

EXPERT = re.compile(r"(?P<layer>.*\bexperts)\.\d+$")
# The third projection that vLLM asks for where experts have no gate (compressed_tensors_moe.py).
NO_UP = "None"


def fuse(names: Iterable[str], architecture: Architecture) -> dict[str, tuple[str, ...]]:
    """Linear layers by the module that vLLM makes of them, members in vLLM's order.

    The groups come in the order of their first member; a layer that nothing is fused with is its
    own group. Where a layer could belong to several fused modules (attention with and without a
    gate, say), the one counts of which most members are there and fewest are missing.
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
    return groups


def moe_layer(name: str) -> str | None:
    """The routed experts that a layer is one of (`model.layers.1.mlp.experts`), None for other
    layers.
    """
    match = EXPERT.match(name.rpartition(".")[0])
    return match["layer"] if match else None


def looked_up(name: str, members: Sequence[str], architecture: Architecture) -> tuple[str, ...]:
    """The names by which vLLM's quantization config knows a fused module: those of its parts, of
    which a layer may lack some (values that are the keys), where it takes the module apart."""
    prefix, dot, last_part = name.rpartition(".")
    fused = len(members) > 1 and last_part in architecture.resolved
    parts = architecture.fused.get(last_part, ()) if fused else ()
    return tuple(f"{prefix}{dot}{part}" for part in parts) or tuple(members)


def also_asked(
    name: str, members: Sequence[str], entries: Sequence[str], architecture: Architecture
) -> Iterator[str]:
    """The entry for the name under which vLLM asks for a module, where none of its entries means
    that.
    """
    asked, renamed = (
        architecture.asked_name(name),
        [architecture.matched(entry) for entry in entries],
    )
    parts = {architecture.asked_name(member) for member in members}
    if moe_layer(members[0]) or all(
        any(matches(entry, part) for entry in renamed) for part in parts
    ):
        return
    if not any(matches(entry, asked) for entry in renamed):
        holder, dot, _ = name.rpartition(".")
        choices = (f"{holder}{dot}{asked.rpartition('.')[2]}", asked)
        exact = (choice for choice in choices if asked and architecture.matched(choice) == asked)
        yield next(exact, f"re:{re.escape(asked)}$")


def _modules(prefix: str, architecture: Architecture) -> Mapping[str, tuple[str, ...]]:
    """The fused modules that may be found below a prefix: an expert has its own, w13."""
    if not EXPERT.match(prefix):
        return architecture.fused
    if architecture.experts is None:
        return {"w13": ("gate_proj", "up_proj")}
    gate, _, up = architecture.experts
    return {"w13": (gate, up)} if up else {}


def _owners(
    leaves: list[str], modules: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Leaf -> (fused module, its members that are there), for the leaves that are fused."""
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


def below(
    module: str, ending: str, architecture: Architecture, others: Iterable[str]
) -> Iterator[str]:
    """Patterns for what is below a module and ends so, in the file's names and in vLLM's, which
    match none of `others`: each begins as far to the right as it can, at the number of the module's
    layer at most.

    vLLM translates names but not patterns where its modules are nested differently: to the right of
    the list of layers both agree.
    """
    for name in dict.fromkeys((module, architecture.vllm_name(module))):
        stack = STACK.search(f"{name}.")
        last = stack.start() + stack[0].startswith(".") if stack else 0
        starts = [at for at in range(last, -1, -1) if at == 0 or name[at - 1] == "."]
        tried = (rf".*\b{re.escape(name[at:])}{ending}" for at in starts)
        fitting = (pattern for pattern in tried if not matches_any(pattern, others))
        yield f"re:{next(fitting, re.escape(name) + ending)}"


def all_names(modules: Iterable[str], architecture: Architecture) -> tuple[str, ...]:
    """Modules by the names of the file, of vLLM and of what it asks for; of routed experts the
    first.
    """
    names = dict.fromkeys(map(_of_one_expert, modules))
    asked = map(architecture.asked_name, names)
    return tuple(dict.fromkeys((*names, *map(architecture.vllm_name, names), *asked)))


def _of_one_expert(module: str) -> str:
    experts = moe_layer(module)
    return f"{experts}.0.{module.rpartition('.')[2]}" if experts else module


def matches_any(pattern: str, modules: Iterable[str]) -> bool:
    """Return whether a pattern matches one of these from its start, as vLLM matches it."""
    return any(map(re.compile(pattern).match, modules))
