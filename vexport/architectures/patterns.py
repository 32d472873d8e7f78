"""Patterns of config.json that name one layer's modules and no other stack's."""

import re
from collections.abc import Iterable, Iterator

from vexport.architectures.fusion import moe_layer
from vexport.architectures.modules import STACK
from vexport.architectures.table import Architecture


def below(module: str, ending: str, architecture: Architecture, others: Iterable[str]) -> Iterator[str]:
    """Patterns for what is below a module and ends so, in the file's names and in vLLM's, which match none of
    `others`: each begins as far to the right as it can, at the number of the module's layer at most.

    vLLM translates names but not patterns where its modules are nested differently: to the right of the
    list of layers both agree.
    """
    for name in dict.fromkeys((module, architecture.vllm_name(module))):
        stack = STACK.search(f"{name}.")
        last = stack.start() + stack[0].startswith(".") if stack else 0
        starts = [at for at in range(last, -1, -1) if at == 0 or name[at - 1] == "."]
        tried = (rf".*\b{re.escape(name[at:])}{ending}" for at in starts)
        fitting = (pattern for pattern in tried if not matches_any(pattern, others))
        yield f"re:{next(fitting, re.escape(name) + ending)}"


def all_names(modules: Iterable[str], architecture: Architecture) -> tuple[str, ...]:
    """Modules by the names of the file, of vLLM and of what it asks for; of routed experts the first."""
    found = dict.fromkeys(map(_of_one_expert, modules))
    asked = map(architecture.asked_name, found)
    return tuple(dict.fromkeys((*found, *map(architecture.vllm_name, found), *asked)))


def _of_one_expert(module: str) -> str:
    experts = moe_layer(module)
    return f"{experts}.0.{module.rpartition('.')[2]}" if experts else module


def matches_any(pattern: str, modules: Iterable[str]) -> bool:
    """Return whether a pattern matches one of these from its start, as vLLM matches it."""
    return any(map(re.compile(pattern).match, modules))
