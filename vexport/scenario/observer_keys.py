"""The keys of a rule that name observers, of weights and of inputs, and what cannot be."""

import re
import sys
from collections.abc import Iterator, Mapping

from vexport.errors import nearest
from vexport.formats.schemes import KEEP, get_scheme
from vexport.scenario.located import Problem
from vexport.scenario.scheme_keys import AUTO
from vexport.types.observer_names import (
    BY_IMPORTANCE,
    OBSERVERS,
    OptionValue,
    folded,
    observer_name,
    option_problems,
)

# The name of a class of another package.
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# Strategies of weights whose groups of columns can be searched by the importance of those.
WITH_IMPORTANCE = ("channel", "group", "tensor_group")


def known_observer(name: str) -> str:
    """The registry name that is meant, or package.module:Class as it is; ValueError lists what is known."""
    found = observer_name(name)
    known = (*OBSERVERS, *(each for each in _registered() if each not in OBSERVERS))
    registered = {folded(each): each for each in known}
    if folded(found) in registered:
        return registered[folded(found)]
    if not _CLASS.fullmatch(name):
        raise ValueError(f"one of {', '.join(known)}, or package.module:Class{nearest(name, known)}")
    return name


def is_vexports(name: str) -> bool:
    """Whether the keywords of an observer are known without its class."""
    return name in OBSERVERS


def keyword_problems(key: str, name: str | None, keywords: Mapping[str, OptionValue]) -> Iterator[Problem]:
    """What is wrong with the keywords of the observer `name`, given under `key`."""
    if name is None and keywords:
        need = "the observer that they are for"
        yield (key,), dict(keywords), need, f"add {key.removesuffix('_kwargs')}"
    if name is None or not is_vexports(name):
        return
    for keyword, need in option_problems(OBSERVERS[name].options, keywords):
        yield (key, keyword), keywords[keyword], need, f"correct it, or remove it: it is a keyword of {name}"


def observer_problems(scheme: str, observer: str | None, input_observer: str | None) -> Iterator[Problem]:
    """Observers that a scheme has no use for, by the key that names them."""
    own = None if scheme in (KEEP, AUTO) else get_scheme(scheme)
    strategy = own.args.weights.strategy if own else WITH_IMPORTANCE[0]
    if observer in BY_IMPORTANCE and strategy not in WITH_IMPORTANCE:
        need = f"an observer without importance: {scheme} has one scale a {strategy}, of many input channels"
        yield ("observer",), observer, need, "use memoryless_mse"
    if input_observer is None:
        return
    if input_observer in BY_IMPORTANCE:
        need = "an observer of ranges or of errors: importance is that of a weight's input channels"
        yield ("input_observer",), input_observer, need, "use static_minmax, minmax or mse"
    elif scheme == KEEP:
        yield ("input_observer",), input_observer, "a scheme that quantizes inputs", "remove it"
    elif own is not None and not own.args.calibrated:
        inputs = own.args.input_activations
        why = "scales its inputs when the model runs" if inputs else "leaves its inputs as they are"
        need = f"a scheme with static input scales (FP8, NVFP4): {scheme} {why}"
        yield ("input_observer",), input_observer, need, "remove it, or use another scheme"


def _registered() -> list[str]:
    """Names of `Observer.register`: there are none unless a program has loaded the classes itself."""
    module = sys.modules.get("vexport.observers.base")
    return [] if module is None else [kind.registry_name for kind in module.Observer.named()]
