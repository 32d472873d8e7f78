"""The `ignore` list of a plan's output, complete for what vLLM fuses and short for experts."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from vexport.architectures.fusion import moe_layer
from vexport.formats.partition import HEADS, is_head
from vexport.plan.linears import STACK, Names


def ignored(
    modules: Mapping[str, Sequence[str]],
    kept: Set[str],
    opaque: Iterable[str],
    names: Names,
) -> tuple[str, ...]:
    """What `ignore` must hold, given layers by the module that vLLM makes of them, those that are kept, and
    the tensors of experts that are copied as they are.

    - Names of checkpoints: vLLM renames them as it renames tensors (apply_vllm_mapper in
      compressed_tensors.py); a pattern is matched with vLLM's own name, so it starts where both agree.
    - Routed experts are looked up by the first expert's projections: one pattern a layer covers them.
    - What lies outside the decoder layers may lie deeper in vLLM, by renames of the inner model that the
      quantization config does not see (Gemma3nModel.hf_to_vllm_mapper): a pattern finds it there too.
    - A fused module that vLLM's quantization config does not take apart is named itself as well.
    """
    linears = [member for members in modules.values() for member in members]
    stacks = {_before_layers(member) for member in linears if names.in_decoder(member)}
    quantized = [member for member in linears if member not in kept]
    patterns: dict[str, None] = {}
    for name, members in modules.items():
        if all(member in kept for member in members):
            outside = _outside(name, stacks)
            lost = outside is None or any(re.search(outside, other) for other in quantized)
            patterns.update(dict.fromkeys(_patterns(name, members, names) if lost else (f"re:.*{outside}",)))
    patterns.update(dict.fromkeys(map(_unknown, opaque)))
    return tuple(patterns)


def ignored_head(linears: Iterable[str]) -> tuple[str, ...]:
    """What names the head that a checkpoint does not store, it being the embeddings: transformers, for which
    it is a linear layer, would look for its scales."""
    return () if any(map(is_head, linears)) else (f"re:.*{HEADS[0]}",)


def _patterns(name: str, members: Sequence[str], names: Names) -> Iterator[str]:
    experts = moe_layer(members[0])
    if experts is not None:
        yield _below(experts)
        return
    yield from members
    last_part = name.rpartition(".")[2]
    if len(members) > 1 and last_part not in names.architecture.resolved:
        yield name


def _before_layers(module: str) -> str:
    """The name of what holds the list of decoder layers, with the dot behind it."""
    stack = STACK.search(module)
    return module[: stack.start() + 1] if stack else ""


def _outside(module: str, stacks: Set[str]) -> str | None:
    """The end of a pattern for what lies outside the decoder layers, None for other modules."""
    if STACK.search(module):
        return None
    holders = (before for before in stacks if before.strip(".") and module.startswith(before))
    return next((rf"\.{re.escape(module[len(before) :])}$" for before in holders), None)


def _below(module: str) -> str:
    """A pattern for all that is below a module, from the number of its layer on."""
    stack = STACK.search(module)
    return rf"re:.*{re.escape(module[stack.start() :] if stack else module)}\..*"


def _unknown(tensor: str) -> str:
    """A pattern for vLLM's routed experts of the layer that a tensor belongs to."""
    stack = STACK.search(tensor)
    layer = tensor[stack.start() : stack.end()] if stack else "."
    return rf"re:.*{re.escape(layer)}.*experts\..*"
