"""The `ignore` list of a plan's output, complete for what vLLM fuses and short for experts."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from vexport.architectures.fusion import moe_layer
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
    - A fused module that vLLM's quantization config does not take apart is named itself as well.
    """
    found: dict[str, None] = {}
    for name, members in modules.items():
        if all(member in kept for member in members):
            found.update(dict.fromkeys(_patterns(name, members, names)))
    found.update(dict.fromkeys(map(_unknown, opaque)))
    return tuple(found)


def _patterns(name: str, members: Sequence[str], names: Names) -> Iterator[str]:
    experts = moe_layer(members[0])
    if experts is not None:
        yield _below(experts)
        return
    yield from members
    leaf = name.rpartition(".")[2]
    if len(members) > 1 and leaf not in names.architecture.resolved:
        yield name


def _below(module: str) -> str:
    """A pattern for all that is below a module, from the number of its layer on."""
    stack = STACK.search(module)
    return rf"re:.*{re.escape(module[stack.start() :] if stack else module)}\..*"


def _unknown(tensor: str) -> str:
    """A pattern for vLLM's routed experts of the layer that a tensor belongs to."""
    stack = STACK.search(tensor)
    layer = tensor[stack.start() : stack.end()] if stack else "."
    return rf"re:.*{re.escape(layer)}.*experts\..*"
