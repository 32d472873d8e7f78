"""The model classes of vLLM as they are written: the source of each and of the classes that it is made of."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from inspect import isfunction
from types import ModuleType
from typing import get_args, get_origin

from torch import nn
from vllm.model_executor.models import registry

MODELS = ("vllm.model_executor.models", "vllm.models", "vllm.model_executor.layers.mamba")


def load_class(module: str, name: str) -> type:
    """A registered class; modules are named relative to vLLM's models unless they have a dot."""
    loaded: type = getattr(
        importlib.import_module(module if "." in module else f"{MODELS[0]}.{module}"), name
    )
    return loaded


def parts_of(model: type) -> list[type]:
    """The classes that a model, of a multimodal one its language model, is made of."""
    _, inner = language_models(model)
    return list(dict.fromkeys(part for root in (inner or [model]) for part in reachable(root)))


@cache
def source(model: type) -> str:
    try:
        return textwrap.dedent(inspect.getsource(model))
    except (OSError, TypeError):
        return ""


@cache
def tree(model: type) -> ast.Module:
    return ast.parse(source(model))


def namespace(model: type) -> ModuleType:
    return importlib.import_module(model.__module__)


@cache
def reachable(model: type) -> tuple[type, ...]:
    """The class, its bases and every module class that its source names, as far as they are models' code."""
    found: dict[type, None] = {}
    todo = [model]
    while todo:
        current = todo.pop()
        if current in found or not current.__module__.startswith(MODELS):
            continue
        found[current] = None
        todo.extend(base for base in current.__mro__[1:] if issubclass(base, nn.Module))
        names = {node.id for node in ast.walk(tree(current)) if isinstance(node, ast.Name)}
        named = [getattr(namespace(current), name, None) for name in sorted(names)]
        # A table of layer types stands for its values.
        values = [item for each in named for item in (each.values() if isinstance(each, dict) else [each])]
        values += [returns for value in values for returns in chosen_classes(value)]
        todo.extend(value for value in values if isinstance(value, type) and issubclass(value, nn.Module))
    return tuple(found)


def chosen_classes(value: object) -> tuple[object, ...]:
    """The class of which a function returns one, by its annotation `type[Class]`."""
    returned = getattr(value, "__annotations__", {}).get("return") if isfunction(value) else None
    return get_args(returned) if get_origin(returned) is type else ()


def language_models(model: type) -> tuple[set[str], list[type]]:
    """The attributes that hold a wrapper's language model, and its classes where the source names them.

    Where no block marks the language model, the class names it for LoRA (`get_mm_mapping`), and what it is
    made of as `language_targets`; else it is what `get_language_model` returns or another class of vLLM.
    """
    for owner in model.__mro__:
        blocks = [
            node
            for node in ast.walk(tree(owner))
            if isinstance(node, ast.With)
            and any("_mark_language_model" in ast.unparse(item) for item in node.items)
        ]
        attributes = {name for block in blocks for node in ast.walk(block) for name in assigned(node)}
        if attributes:
            nodes = [node for block in blocks for node in ast.walk(block)]
            return attributes, list(
                dict.fromkeys(part for node in nodes for part in named_class(node, owner))
            )
    for owner in model.__mro__:
        keywords = [keyword for call in calls_in(owner) for keyword in call.keywords]
        targets = [keyword.value for keyword in keywords if keyword.arg == "language_targets"]
        named = [literal(keyword.value) for keyword in keywords if keyword.arg == "language_model"]
        attributes = {name for name in named if isinstance(name, str)} or {*returned_or_registered(owner)}
        if attributes:
            return attributes, [part for target in targets for part in named_class(target, owner)]
    return set(), []


def returned_or_registered(owner: type) -> Iterator[str]:
    """The attribute that `get_language_model` returns, and those that hold what is made by a class's name."""
    for node in ast.walk(tree(owner)):
        if isinstance(node, ast.FunctionDef) and node.name == "get_language_model":
            values = [end.value for end in ast.walk(node) if isinstance(end, ast.Return) and end.value]
            ends = map(ast.unparse, values)
            yield from (end.removeprefix("self.") for end in ends if end.startswith("self."))
        elif isinstance(node, ast.Assign) and "init_vllm_registered_model(" in ast.unparse(node.value):
            yield from assigned(node)


def assigned(node: ast.AST) -> Iterator[str]:
    """The attributes of self that a statement assigns a module to."""
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    for target in targets:
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            yield target.attr


def named_class(node: ast.AST, owner: type) -> Iterator[type]:
    """A model class that is called by name, or one that is named as the architecture to build."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        entry = registry._TEXT_GENERATION_MODELS.get(node.value)
        if entry is not None:
            yield load_class(*entry)
    if isinstance(node, ast.Name):
        value = getattr(namespace(owner), node.id, None)
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__.startswith(MODELS):
            yield value


def literal(node: ast.AST) -> object:
    """The value of a literal, or the key of a subscript; None where it is computed."""
    try:
        return ast.literal_eval(node.slice if isinstance(node, ast.Subscript) else node)
    except (ValueError, TypeError):
        return None


def calls_in(part: type) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree(part)) if isinstance(node, ast.Call))


def name_of(call: ast.Call) -> str:
    """Return what a call calls, without its module."""
    return ast.unparse(call.func).rpartition(".")[2]
