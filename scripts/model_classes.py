"""Read the source of vLLM's model classes and of the classes in them.

vLLM merges some linear layers, such as q, k and v. This script finds the sizes of the parts of a
merged layer, as sums and products of config keys.
"""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import isfunction
from types import ModuleType
from typing import get_args, get_origin

from tables import name_of
from torch import nn
from vllm.model_executor.models import registry

MODELS = ("vllm.model_executor.models", "vllm.models", "vllm.model_executor.layers.mamba")

MERGED = "MergedColumnParallelLinear"
QKV = "QKVParallelLinear"
SHARDED = "mamba_v2_sharded_weight_loader"
# Names of sizes that vexport/architectures/config.py defines.
QUERIES_KEYS_VALUES = ["queries", "keys", "values"]
OPERATORS = {ast.Mult: "*", ast.Add: "+"}
DEEPEST = 8


def load_class(module: str, name: str) -> type:
    """Return a registered class. Module names without a dot are relative to vLLM's models."""
    loaded: type = getattr(
        importlib.import_module(module if "." in module else f"{MODELS[0]}.{module}"), name
    )
    return loaded


def parts_of(model: type) -> list[type]:
    """Return the classes in a model, or in its language model if it is multimodal."""
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
    """Return the class and every module class of models' code that its source names.

    Bases are included.
    """
    found: dict[type, None] = {}
    todo = [model]
    while todo:
        current = todo.pop()
        if current in found or not current.__module__.startswith(MODELS):
            continue
        found[current] = None
        names = {node.id for node in ast.walk(tree(current)) if isinstance(node, ast.Name)}
        named = [getattr(namespace(current), name, None) for name in sorted(names)]
        # A table of layer types stands for its values.
        values = [
            item for each in named for item in (each.values() if isinstance(each, dict) else [each])
        ]
        values += [returns for value in values for returns in chosen_classes(value)]
        todo.extend(
            value for value in values if isinstance(value, type) and issubclass(value, nn.Module)
        )
    return tuple(found)


def chosen_classes(value: object) -> tuple[object, ...]:
    """Return the class in the annotation `type[Class]` of a function that returns a class."""
    returned = getattr(value, "__annotations__", {}).get("return") if isfunction(value) else None
    return get_args(returned) if get_origin(returned) is type else ()


def language_models(model: type) -> tuple[set[str], list[type]]:
    """Return the attributes that hold a wrapper's language model, and its classes.

    Classes are missing if the source does not name them. If no block marks the language model, the
    class names it for LoRA (`get_mm_mapping`), and its parts as `language_targets`. Otherwise it is
    the module that is made by the name of another vLLM class.
    """
    for owner in model.__mro__:
        blocks = [
            node
            for node in ast.walk(tree(owner))
            if isinstance(node, ast.With)
            and any("_mark_language_model" in ast.unparse(item) for item in node.items)
        ]
        attributes = {
            name for block in blocks for node in ast.walk(block) for name in assigned(node)
        }
        if attributes:
            nodes = [node for block in blocks for node in ast.walk(block)]
            return attributes, list(
                dict.fromkeys(part for node in nodes for part in named_class(node, owner))
            )
    for owner in model.__mro__:
        keywords = [keyword for call in calls_in(owner) for keyword in call.keywords]
        targets = [keyword.value for keyword in keywords if keyword.arg == "language_targets"]
        named = [literal(keyword.value) for keyword in keywords if keyword.arg == "language_model"]
        attributes = {name for name in named if isinstance(name, str)} or {*registered(owner)}
        if attributes:
            return attributes, [part for target in targets for part in named_class(target, owner)]
    return set(), []


def registered(owner: type) -> Iterator[str]:
    """Yield the attributes that hold modules made by a class's name."""
    for node in ast.walk(tree(owner)):
        if isinstance(node, ast.Assign) and "init_vllm_registered_model(" in ast.unparse(
            node.value
        ):
            yield from assigned(node)


def assigned(node: ast.AST) -> Iterator[str]:
    """Yield the attributes of self to which a statement assigns a module."""
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
    """Yield the model class that a node calls, or that it names as an architecture."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        entry = registry._TEXT_GENERATION_MODELS.get(node.value)
        if entry is not None:
            yield load_class(*entry)
    if isinstance(node, ast.Name):
        value = getattr(namespace(owner), node.id, None)
        if (
            isinstance(value, type)
            and issubclass(value, nn.Module)
            and value.__module__.startswith(MODELS)
        ):
            yield value


def literal(node: ast.AST) -> object:
    """Return the value of a literal, or the key of a subscript.

    Returns None for a computed value.
    """
    try:
        return ast.literal_eval(node.slice if isinstance(node, ast.Subscript) else node)
    except (ValueError, TypeError):
        return None


def calls_in(part: type) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree(part)) if isinstance(node, ast.Call))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A function, with the arguments of a call of it and the scope of that call."""

    function: ast.FunctionDef
    arguments: Mapping[str, ast.expr] = field(default_factory=dict)
    caller: "Scope | None" = None

    def look_up(self, node: ast.expr) -> "tuple[ast.expr, Scope] | None":
        """Return the value that was assigned to a name or an attribute of self, and its scope."""
        if isinstance(node, ast.Name):
            if node.id in self.arguments and self.caller is not None:
                return self.arguments[node.id], self.caller
            found = assignment(self.function, node.id)
            return (found, self) if found is not None else None
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            built = self if self.function.name == "__init__" else self.caller
            found = assignment(built.function, f"self.{node.attr}") if built is not None else None
            return (found, built) if found is not None and built is not None else None
        return None


def output_sizes(parts: list[type]) -> dict[str, list[str]]:
    """Return the merged layers of classes, by the last part of their names.

    Each layer has an expression in config keys for each of its parts, or ["1", "1"] if the parts
    are equal.
    """
    found: dict[str, list[str]] = {}
    for part in parts:
        for function, calls in functions(part):
            for call in calls:
                if name_of(call).endswith((MERGED, QKV)):
                    known = (
                        (layer_of(call, scope), sizes_of(call, scope))
                        for scope in scopes(part, function, parts)
                    )
                    name, sizes = next(
                        ((name, sizes) for name, sizes in known if name and sizes), ("", [])
                    )
                    found.setdefault(
                        name or "", ["1"] * len(sizes) if len({*sizes}) == 1 else sizes
                    )
    return {name: sizes for name, sizes in sorted(found.items()) if len(sizes) > 1}


@cache
def functions(part: type) -> list[tuple[ast.FunctionDef, list[ast.Call]]]:
    found = [node for node in ast.walk(tree(part)) if isinstance(node, ast.FunctionDef)]
    return [
        (each, [node for node in ast.walk(each) if isinstance(node, ast.Call)]) for each in found
    ]


def scopes(
    part: type, function: ast.FunctionDef, parts: Sequence[type], depth: int = 0
) -> Iterator[Scope]:
    """Yield the scopes of a method's calls by the class itself.

    Calls of `__init__` are by the classes that build the class. The last scope has no known
    arguments.
    """
    wanted = part.__name__ if function.name == "__init__" else f"self.{function.name}"
    for caller in (parts if function.name == "__init__" else [part]) if depth < DEEPEST else ():
        for other, calls in functions(caller):
            for call in (
                call for call in calls if other is not function and text_of(call) == wanted
            ):
                for scope in scopes(caller, other, parts, depth + 1):
                    yield Scope(function=function, arguments=given(call, function), caller=scope)
    yield Scope(function=function)


@cache
def text_of(call: ast.Call) -> str:
    return ast.unparse(call.func)


def given(call: ast.Call, function: ast.FunctionDef) -> dict[str, ast.expr]:
    names = [argument.arg for argument in function.args.args[1:]]
    return {
        **dict(zip(names, call.args, strict=False)),
        **{word.arg: word.value for word in call.keywords if word.arg is not None},
    }


def assignment(function: ast.FunctionDef, target: str) -> ast.expr | None:
    """Return the value assigned to a name in a function, or None without a single value.

    An assignment outside of branches takes precedence.
    """
    for nodes in (function.body, [*ast.walk(function)]):
        values = [
            node.value
            for node in nodes
            if isinstance(node, ast.Assign) and target in map(ast.unparse, node.targets)
        ]
        if values:
            return values[0] if len(values) == 1 else None
    return None


def layer_of(call: ast.Call, scope: Scope) -> str | None:
    node = next((word.value for word in call.keywords if word.arg == "prefix"), None)
    while isinstance(node, ast.Name):
        found = scope.look_up(node)
        node, scope = found if found is not None else (None, scope)
    last = ast.unparse(node).strip("'\")").rpartition(".")[2] if node is not None else ""
    return last if last.isidentifier() else None


def sizes_of(call: ast.Call, scope: Scope) -> list[str] | None:
    """Return an expression for each part of a merged layer, or None if a part is unknown."""
    if name_of(call).endswith(QKV):
        return QUERIES_KEYS_VALUES
    sizes = next((word.value for word in call.keywords if word.arg == "output_sizes"), None)
    return listed(
        sizes if sizes is not None else call.args[1] if len(call.args) > 1 else None, scope
    )


def listed(node: ast.expr | None, scope: Scope) -> list[str] | None:
    """Return a list of sizes, written out or repeated."""
    if isinstance(node, ast.List):
        sizes = [expression(item, scope) for item in node.elts]
        return [size for size in sizes if size] if all(sizes) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = sorted(
            (node.left, node.right), key=lambda side: not isinstance(side, ast.List)
        )
        times = literal(right)
        if isinstance(left, ast.List) and len(left.elts) == 1 and isinstance(times, int):
            return ["1"] * times
        return None
    if isinstance(node, ast.IfExp):
        test = constant(node.test, scope)
        return listed(node.body if test else node.orelse, scope) if test is not None else None
    found = scope.look_up(node) if node is not None else None
    return listed(*found) if found is not None else None


def constant(node: ast.expr, scope: Scope) -> bool | None:
    """Return a truth value that is written in the code."""
    if isinstance(node, ast.Constant):
        return bool(node.value)
    found = scope.look_up(node)
    return constant(*found) if found is not None else None


def expression(node: ast.expr, scope: Scope) -> str | None:
    """Return a size in config keys. `a or b` is b if the config has no a."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, int) else None
    if isinstance(node, ast.BinOp):
        left, right = expression(node.left, scope), expression(node.right, scope)
        operator = OPERATORS.get(type(node.op))
        return f"({left} {operator} {right})" if left and right and operator else None
    if isinstance(node, ast.IfExp):
        return optional(node, scope)
    if isinstance(node, ast.Call):
        return called_size(node, scope)
    if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config"):
        return node.attr
    found = scope.look_up(node)
    return expression(*found) if found is not None else None


def optional(node: ast.IfExp, scope: Scope) -> str | None:
    """Return the size for `other if key is None else key`."""
    test = node.test
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Is):
        return None
    key, other = expression(node.orelse, scope), expression(node.body, scope)
    return f"({key} or {other})" if key and other and ast.unparse(test.left).endswith(key) else None


def called_size(call: ast.Call, scope: Scope) -> str | None:
    """Return the size from a call: an optional key, a size converted to int, or a sum."""
    name, arguments = name_of(call), call.args
    if name == "getattr" and ast.unparse(arguments[0]).endswith("config"):
        key = literal(arguments[1])
        other = expression(arguments[2], scope) if len(arguments) > 2 else None
        return f"({key} or {other})" if other else str(key)
    if name == "int" and len(arguments) == 1:
        return expression(arguments[0], scope)
    if name == "sum" and isinstance(arguments[0], ast.Tuple | ast.List):
        sizes = [expression(item, scope) for item in arguments[0].elts]
        return f"({' + '.join(size for size in sizes if size)})" if all(sizes) else None
    return None


def groups(parts: list[type]) -> dict[str, str]:
    """Return the layers that are split into whole groups, with the number of groups.

    If there are fewer groups than ranks, a loader that splits tensors by row repeats them
    (mamba_v2_sharded_weight_loader).
    """
    found: dict[str, str] = {}
    for part in parts:
        for function, calls in functions(part):
            if all(name_of(call) != SHARDED for call in calls):
                continue
            for scope in scopes(part, function, parts):
                count = expression(ast.Name("n_groups"), scope)
                quantized = (
                    call for call in calls if name_of(call).endswith("ColumnParallelLinear")
                )
                for name in (
                    layer_of(call, scope)
                    for call in quantized
                    if "quant_config=quant_config" in ast.unparse(call)
                ):
                    if count and name:
                        found.setdefault(name, count)
    return found
