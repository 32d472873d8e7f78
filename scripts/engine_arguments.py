"""Read the types of vLLM's engine arguments from a wheel, for scripts/generate_versions.py.

A type is stored as text: `bool`, `int`, `float`, `str`, `None`, `Literal[...]`, `Enum[...]` with
the names of an enumeration's members, `list[T]` (also for tuples and sets), `dict[K, V]`, the name
of a config class whose fields are stored too, and `Any` for all other types. Values that vLLM does
not validate are `Any` as well. Members of a union are separated by `|`.
"""

import ast
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from generate_versions import Wheel

ARGUMENTS = ("vllm/engine/arg_utils.py", "EngineArgs")
CONFIGS = ("vllm/config/vllm.py", "VllmConfig")
Fields = dict[str, str]
# The members of each field's type.
Members = dict[str, list[str]]

_PLAIN = {"bool", "int", "float", "str", "None"}
_LISTS = {"list", "tuple", "set", "frozenset", "Sequence", "Iterable"}
_DICTS = {"dict", "Mapping"}
_BARE = {"dict": "dict[str, Any]", "list": "list[Any]"}
_WRAPPERS = {"Annotated", "Optional", "Final"}
_ANY = "Any"
_FREE = "dict[str, Any]"


def engine_types(wheel: "Wheel") -> Mapping[str, Fields]:
    """Return the types of EngineArgs, and of all config classes in them: class -> field -> type.

    vLLM passes an argument without a config class, such as `speculative_config`, to the class of
    VllmConfig's field with the same name. The argument then has the type of this field. An argument
    whose default is the default of a config's field also has this field's type.
    """
    types = _Types(wheel)
    arguments = types.fields(*ARGUMENTS)
    stored = types.stored_types(*ARGUMENTS)
    configs = types.fields(*CONFIGS)
    for name, given in arguments.items():
        members = [*given, *stored.get(name, ())]
        if name in configs and _FREE in members:
            members = configs[name]
        elif types.classes.keys() & {*members}:
            members = [member for member in members if member != _FREE]
        arguments[name] = members
    types.classes["EngineArgs"] = arguments
    return {
        name: {field: " | ".join(dict.fromkeys(members)) for field, members in fields.items()}
        for name, fields in sorted(_reachable(types.classes, "EngineArgs").items())
    }


def _reachable(classes: Mapping[str, Members], name: str) -> dict[str, Members]:
    """Return a class, and the classes that the types of its fields name."""
    found: dict[str, Members] = {}
    todo = [name]
    while todo:
        current = todo.pop()
        if current in found:
            continue
        found[current] = classes[current]
        for member in chain.from_iterable(classes[current].values()):
            names = {node.id for node in ast.walk(ast.parse(member)) if isinstance(node, ast.Name)}
            todo.extend(names & classes.keys())
    return found


class _Types:
    """Types of fields in a wheel. `classes` are the config classes that were found so far."""

    def __init__(self, wheel: "Wheel") -> None:
        self.wheel = wheel
        self.classes: dict[str, Members] = {}

    def fields(self, file: str, name: str) -> Members:
        """Return the fields that the constructor of a class takes, with inherited fields."""
        found: Members = {}
        node = self.wheel.classes(file)[name]
        for base in node.bases:
            place = self._place(file, ast.unparse(base))
            if place is not None:
                found |= self.fields(*place)
        for line in node.body:
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and not _is_set_by_class(line)
            ):
                found[line.target.id] = self._members(file, line.annotation)
        return found

    def stored_types(self, file: str, name: str) -> Members:
        """Return the types of the config fields whose defaults are the defaults of a class."""
        found: Members = {}
        for line in self.wheel.classes(file)[name].body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                default = line.value
                match default:
                    case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
                        pass
                    case ast.Call(args=[ast.Name(id=owner), ast.Constant(value=str(attribute))]):
                        pass
                    case _:
                        continue
                place = self._place(file, owner)
                if place is not None and place[1] in self.wheel.classes(place[0]):
                    found[line.target.id] = self.fields(*place).get(attribute, [])
        return found

    def _members(self, file: str, node: ast.expr) -> list[str]:
        """Return the members of a type, each once."""
        return list(dict.fromkeys(self._each(file, node)))

    def _each(self, file: str, node: ast.expr) -> Iterator[str]:
        match node:
            case ast.Constant(value=None):
                yield "None"
            case ast.Constant(value=str(text)):
                yield from self._each(file, ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                yield from self._each(file, left)
                yield from self._each(file, right)
            case ast.Subscript(value=container, slice=inner):
                name = ast.unparse(container).rpartition(".")[2]
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                yield from self._subscript(file, name, parts)
            case ast.Name() | ast.Attribute():
                yield from self._named(file, ast.unparse(node))
            case _:
                yield _ANY

    def _subscript(self, file: str, name: str, parts: list[ast.expr]) -> Iterator[str]:
        if name == "Literal":
            literals = [value for part in parts for value in self._literals(file, part)]
            yield f"Literal[{', '.join(map(repr, literals))}]"
        elif name == "Union":
            for part in parts:
                yield from self._each(file, part)
        elif name in _WRAPPERS:
            yield from self._each(file, parts[0])
            if name == "Optional":
                yield "None"
        elif name in _LISTS:
            items = [part for part in parts if ast.unparse(part) != "..."]
            members = [member for part in items for member in self._each(file, part)]
            yield f"list[{' | '.join(dict.fromkeys(members))}]"
        elif name in _DICTS:
            keys, values = (" | ".join(self._members(file, part)) for part in parts)
            yield f"dict[{keys}, {values}]"
        else:
            yield _ANY

    def _literals(self, file: str, node: ast.expr) -> Iterator[object]:
        """Yield the values of a Literal, with the values of other Literals that it names."""
        if isinstance(node, ast.Constant):
            yield node.value
            return
        for member in self._each(file, node):
            assert member.startswith("Literal["), member
            yield from ast.literal_eval(member.removeprefix("Literal"))

    def _named(self, file: str, name: str) -> Iterator[str]:
        if name in _PLAIN:
            yield name
            return
        if name in _BARE:
            yield _BARE[name]
            return
        place = self._place(file, name)
        if place is None:
            yield _ANY
            return
        there, found = place
        if found in self.wheel.classes(there):
            yield self._class(there, found)
        elif (value := _alias(self.wheel.tree(there), found)) is not None:
            yield from self._each(there, value)
        else:
            yield _ANY

    def _place(self, file: str, name: str) -> tuple[str, str] | None:
        """Return the file and the name of a definition, or None if it is not in the wheel."""
        first, _, rest = name.partition(".")
        if rest:
            module = self._module(file, first)
            return self._place(module, rest) if module else None
        if name in self.wheel.classes(file) or _alias(self.wheel.tree(file), name) is not None:
            return file, name
        place = self.wheel.imports(file).get(name)
        return self._place(*place) if place else None

    def _module(self, file: str, name: str) -> str:
        """Return the file of a module that `import MODULE as NAME` imports, or "" if none does."""
        lines = [node for node in ast.walk(self.wheel.tree(file)) if isinstance(node, ast.Import)]
        aliases = {each.asname: each.name for line in lines for each in line.names}
        return self.wheel.file_of(aliases[name], file) if name in aliases else ""

    def _class(self, file: str, name: str) -> str:
        """Return the type of a class: its name, or the members of an enumeration."""
        node = self.wheel.classes(file)[name]
        if any("Enum" in ast.unparse(base) for base in node.bases):
            return f"Enum[{', '.join(map(repr, _enumerated(node)))}]"
        if not any("config" in ast.unparse(each) for each in (*node.decorator_list, *node.bases)):
            return _ANY
        if name not in self.classes:
            self.classes[name] = {}  # a class may name itself
            self.classes[name] = self.fields(file, name)
        return name


def _is_set_by_class(line: ast.AnnAssign) -> bool:
    """Return True for a class variable, and for a field that no caller sets."""
    text = ast.unparse(line.annotation)
    return "ClassVar" in text or (
        line.value is not None and "init=False" in ast.unparse(line.value)
    )


def _alias(tree: ast.Module, name: str) -> ast.expr | None:
    """Return the type that a module gives a name.

    A block for type checkers comes first: in it, the type is not hidden for the sake of start-up.
    """
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
    for line in [line for body in [*blocks, tree.body] for line in body]:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = getattr(line, "value", None)
            return value if isinstance(value, ast.expr) else None
    return None


def _enumerated(node: ast.ClassDef) -> list[object]:
    """Return the names of an enumeration's members, and their values if these are numbers."""
    found: list[object] = []
    for line in node.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            found.append(line.targets[0].id)
            if isinstance(line.value, ast.Constant) and isinstance(line.value.value, int):
                found.append(line.value.value)
    return found
