"""Collect the tensors of transformers' models under small configs that differ in a single key.

Tensors have the names that checkpoints on the hub use. The numbers in a config are replaced by
`Traced` numbers. While a model's code computes with them, they record the config keys from which
they were computed.
"""

import ast
import copy
import inspect
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from built_modules import stored_tensors
from generate_modules import default_of
from transformers import AutoConfig, PretrainedConfig
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES, ALLOWED_MLP_LAYER_TYPES

from vexport.architectures import with_stars
from vexport.architectures.layout_table import ClassLayout, ConfigValues
from vexport.engine.dry.fake_platform import PlaceholderValues
from vexport.records import Json

Values = dict[str, Json]
Numbers = tuple[int, ...]
# Keys that do not affect any tensor.
IRRELEVANT = re.compile(
    r"transformers_version|_name_or_path|architectures|model_type|dtype|torch_dtype|.*token_?(id|index|ids)?$|"
    r".*dropout|.*_eps|initializer.*|output_(attentions|hidden_states|router_logits|scores)|return_dict.*|use_cache|"
    r".*_act|hidden_act|activation.*|is_encoder_decoder|problem_type|chunk_size.*|router_aux.*|rope_.*|.*_prob|"
    r".*_coef|attn_implementation|.*scaling.*|time_step(_min|_max|_floor|_limit|_scale|_init_scheme)?|"
    r"_attn.*|id2label|label2id|pruned_heads|max_length"
)
# Matches code of a model that reads an optional key of its config.
ASKED = re.compile(
    r'getattr\((?:\w+\.)?(?:\w+_)?config, "(\w+)"|kwargs\.(?:pop|get)\("(\w+)"|"(\w+)" in kwargs'
)
LISTED = (*ALLOWED_ATTN_LAYER_TYPES, *ALLOWED_MLP_LAYER_TYPES)
LAYERS = re.compile(r"layers|depth|blocks")
LONGEST, MOST_TRIES, MOST_COMBINED = 300, 24, 6
PLAIN = ClassLayout(types={})
# Factors up to this number occur in every model's code: gate and up; queries, keys and values; four
# gates.
LARGEST_FACTOR = 4


class Traced(int):
    """A number from a config, with the expression that computed it."""

    text: str
    # Every number that was computed from a config, with its expressions.
    made: dict[int, dict[str, None]] = {}

    def __new__(cls, value: int, text: str) -> "Traced":
        self = int.__new__(cls, value)
        self.text = text
        if len(text) <= LONGEST:
            cls.made.setdefault(int(value), {})[text] = None
        return self

    def __deepcopy__(self, memo: object) -> "Traced":
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __pow__(self, other: int, *_: object) -> Any:
        return Traced(int(self) ** other, f"({self.text} ** {other})")


def traced(name: str, sign: str) -> None:
    """Make an operation of numbers record its operands."""
    forward, backward = getattr(int, f"__{name}__"), getattr(int, f"__r{name}__")

    def of(self: Traced, other: object) -> object:
        value = forward(self, other)
        known = type(value) is int and not isinstance(other, bool)
        return (
            Traced(value, f"({self.text} {sign} {getattr(other, 'text', other)})")
            if known
            else value
        )

    def with_number(self: Traced, other: object) -> object:
        value = backward(self, other)
        return Traced(value, f"({other} {sign} {self.text})") if type(value) is int else value

    setattr(Traced, f"__{name}__", of)
    setattr(Traced, f"__r{name}__", with_number)


for operation, operator in {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "floordiv": "//",
    "mod": "%",
}.items():
    traced(operation, operator)


def sized(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function of torch that accepts several traced sizes.

    torch's function accepts traced sizes only in a tuple.
    """

    def takes(*sizes: Any, **options: Any) -> torch.Tensor:
        several = sizes and all(isinstance(each, int) for each in sizes)
        return make(sizes, **options) if several else make(*sizes, **options)

    return takes


torch.utils._device._device_constructors()  # cache torch's functions before they are replaced
for function in ("empty", "ones", "zeros", "randn", "rand"):
    setattr(torch, function, sized(getattr(torch, function)))


def with_traces(value: Json, path: str = "", layers: Set[int] = frozenset()) -> Any:
    """Return a config with numbers that record their keys.

    The entries of a list with a number for each layer are recorded as `key[i]`.
    """
    if isinstance(value, dict):
        counts = {
            each for key, each in value.items() if LAYERS.search(key) and isinstance(each, int)
        }
        return {
            key: with_traces(each, f"{path}.{key}" if path else key, counts)
            for key, each in value.items()
        }
    if isinstance(value, list):
        of_layers = len(value) > 1 and len(value) in layers
        return [
            with_traces(each, f"{path}[{'i' if of_layers else number}]")
            for number, each in enumerate(value)
        ]
    return (
        Traced(value, path) if isinstance(value, int) and is_number(value) else copy.deepcopy(value)
    )


def is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A config, as it is given and as transformers reads it, and the tensors of its model.

    `made` are the numbers that the model's code computed from the config, with their expressions.
    """

    raw: Values
    config: Values
    tensors: Mapping[str, tuple[int, ...]]
    made: Mapping[int, Mapping[str, None]]

    @cached_property
    def keys(self) -> dict[str, Json]:
        return dict(leaves(self.config))

    @cached_property
    def values(self) -> ConfigValues:
        return ConfigValues(self.config, PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Two samples with configs that differ in a single key."""

    path: str
    before: Sample
    after: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Literals:
    """Numbers that an expression may contain, and keys that had several values."""

    numbers: frozenset[int]
    keys: frozenset[str]


@dataclass(slots=True, kw_only=True)
class Model:
    """A class of transformers, and the samples of it."""

    kind: type
    config: type[PretrainedConfig]
    raw: Values
    hidden: tuple[str, ...] = ()
    samples: list[Sample] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    # The classes in the models, and the keys for which another value also made a model.
    parts: set[type] = field(default_factory=set)
    varied: set[str] = field(default_factory=set)

    @property
    def literals(self) -> Literals:
        """Return the numbers in the class's code.

        Larger values of keys that could not be varied are left out.
        """
        unvaried = {
            number
            for sample in self.samples
            for path, value in sample.keys.items()
            if path not in self.varied
            for number in (value if isinstance(value, list) else [value])
            if isinstance(number, int) and is_number(number) and number > LARGEST_FACTOR
        }
        written = frozenset(written_numbers([*sorted(self.parts, key=str), self.config]))
        return Literals(numbers=written - unvaried, keys=frozenset(self.varied))

    @classmethod
    def of(cls, kind: type, model_type: str, raw: Values) -> "Model":
        """Return a class with its first config."""
        config = type(AutoConfig.for_model(model_type))
        return cls(kind=kind, config=config, raw=raw, hidden=tuple(hidden_keys(kind, raw)))

    def sample(self, raw: Values) -> Sample | None:
        """Return the model of a config.

        Returns None if the model cannot be built or if a tensor has a dimension of 0.
        """
        Traced.made = {}
        try:
            config = self.config.from_dict(with_traces(raw))
            read = json.loads(
                json.dumps(config.to_dict(), default=str)
            )  # before the model changes it
            with torch.device("meta"), PlaceholderValues():
                made = self.kind._from_config(config, dtype=torch.bfloat16)  # type: ignore[attr-defined]
            shapes = {
                name: tuple(tensor.shape) for name, tensor in stored_tensors(made, config).items()
            }
            self.parts |= {type(module) for module in made.modules()}
        except Exception:
            return None
        if any(0 in shape for shape in shapes.values()):
            return None
        return Sample(raw=raw, config=joined(raw, read), tensors=shapes, made=Traced.made)

    def observe(self) -> None:
        """Vary each key of the config.

        Vary all keys again after a change that brings new tensors.
        """
        base = self.sample(self.raw)
        if base is None:
            fill(self.raw)
            base = self.sample(self.raw)
        if base is None:
            raise ValueError("transformers makes no model of its default config")
        self.samples.append(base)
        self.vary(base)
        known, nulls = {*map(with_stars, base.tensors)}, set[str]()
        for change in list(self.changes):
            path, before, after = change.path, change.before, change.after
            if new := {*map(with_stars, after.tensors)} - known:
                known |= new
                self.vary(after)
            elif None in (before.keys.get(path), after.keys.get(path)) and path not in nulls:
                if before.tensors == after.tensors:
                    continue
                nulls.add(path)
                self.vary(after, holder=path.rpartition(".")[0])
        self.combine()

    def vary(self, base: Sample, *, holder: str | None = None) -> None:
        """Change each key of a config to several other values.

        If `holder` names a part of the config, only numbers in that part are changed.
        """
        values = {**dict.fromkeys(self.hidden), **base.keys}
        layers = {
            value
            for path, value in values.items()
            if LAYERS.search(path) and isinstance(value, int)
        }
        for path, value in values.items():
            if holder is not None and not (is_number(value) and path.rpartition(".")[0] == holder):
                continue
            alike = 0
            for choices in variations(path, value, layers):
                raws = (changed(base.raw, path, choice) for choice in choices if choice != value)
                made = (self.sample(raw) for raw in raws if raw is not None)
                other = next((sample for sample in made if sample is not None), None)
                if other is not None:
                    self.samples.append(other)
                    self.varied.add(path)
                    self.changes.append(
                        Change(path=aliased_key(path, base, other), before=base, after=other)
                    )
                    alike += other.tensors == base.tensors
                if alike == (1 if value is None else 2):  # the key does not affect any tensor
                    break

    def combine(self) -> None:
        """Add models with configs that differ from the first config in several keys."""
        rng, first = random.Random(0), self.samples[0]
        self.samples += filter(None, map(self.sample, self.switched(first)))
        changes = {
            change.path: change.after
            for change in self.changes
            if change.before is first and change.after.tensors != first.tensors
        }
        made = 0
        for _ in range(MOST_TRIES if changes else 0):
            raw: Values | None = first.raw
            for path in rng.sample(sorted(changes), min(len(changes), 1 + len(changes) // 4)):
                value = part_of(changes[path].raw, path)[path.rpartition(".")[2]]
                raw = changed(raw, path, value) if raw else None
            other = self.sample(raw) if raw and made < MOST_COMBINED else None
            if other is not None:
                self.samples.append(other)
                made += 1

    def switched(self, first: Sample) -> Iterator[Values]:
        """Yield configs with a different list of layer kinds and a single changed switch.

        A switch may affect only layers of a certain kind. In the first config the last layer may be
        the only layer of that kind.
        """
        changes = [change for change in self.changes if change.before is first]
        kinds = {
            json.dumps([change.path, value]): (change.path, value)
            for change in changes
            if is_words(value := change.after.keys.get(change.path))
        }
        switches = {
            change.path: value
            for change in changes
            if isinstance(value := change.after.keys.get(change.path), bool)
            and change.after.tensors != first.tensors
        }
        for (path, value), (switch, turned) in product(kinds.values(), switches.items()):
            if (raw := changed(first.raw, path, value)) and (raw := changed(raw, switch, turned)):
                yield raw


def is_words(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def written_numbers(classes: Iterable[type]) -> Iterator[int]:
    """Yield the whole numbers in the code of transformers' classes and of their modules' functions.

    Defaults of fields, arguments and optional config keys are left out: they are sizes of the
    default config.
    """
    bases = {
        base
        for each in classes
        for base in each.__mro__
        if base.__module__.startswith("transformers.")
    }
    for module in sorted({base.__module__ for base in bases if ".models." in base.__module__}):
        names = {base.__name__ for base in bases if base.__module__ == module}
        for node in ast.parse(inspect.getsource(sys.modules[module])).body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                bodies = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            else:
                bodies = [node] if isinstance(node, ast.FunctionDef) else []
            for line in (line for body in bodies for line in body.body):
                defaults = {id(each) for call in ast.walk(line) for each in default_of_key(call)}
                yield from (
                    each.value
                    for each in ast.walk(line)
                    if isinstance(each, ast.Constant)
                    and type(each.value) is int
                    and id(each) not in defaults
                )


def default_of_key(node: ast.AST) -> list[ast.expr]:
    """Return the default for a missing config key in code like `getattr(config, "key", 4)`."""
    if not isinstance(node, ast.Call):
        return []
    name = ast.unparse(node.func).rpartition(".")[2]
    arguments = node.args[1:] if name == "getattr" else node.args if name in ("get", "pop") else []
    is_key = (
        bool(arguments)
        and isinstance(arguments[0], ast.Constant)
        and isinstance(arguments[0].value, str)
    )
    return arguments[1:] if is_key else []


def fill(raw: Values) -> None:
    """Set keys that are null to a value that fits their names.

    Use this if the default config makes no model.
    """
    for path in [path for path, value in leaves(raw) if value is None]:
        part, key = part_of(raw, path), path.rpartition(".")[2]
        layers = part.get("num_hidden_layers")
        if key == "layer_types" and isinstance(layers, int):
            part[key] = [LISTED[0]] * layers
        elif is_number(default := default_of(key)):
            part[key] = default


def joined(one: Values, other: Values) -> Values:
    """Return the keys of both configs. The second config's values take precedence."""
    both: Values = {**one, **other}
    for key, value in one.items():
        inner = other.get(key)
        if isinstance(value, dict) and isinstance(inner, dict):
            both[key] = joined(value, inner)
    return both


def hidden_keys(kind: type, raw: Values) -> Iterator[str]:
    """Yield keys that a class or its config reads, but that default configs lack.

    Each key is yielded for each part of a config.
    """
    names: dict[str, None] = {}
    for file in sorted(Path(inspect.getfile(kind)).parent.glob("*.py")):
        names |= dict.fromkeys(
            name for found in ASKED.findall(file.read_text()) for name in found if name
        )
    known = {path for path, _ in leaves(raw)}
    for part in sorted({path.rpartition(".")[0] for path in known}):
        for name in names:
            path = f"{part}.{name}" if part else name
            if path not in known and not IRRELEVANT.fullmatch(name) and len(name) > 2:
                yield path


def leaves(values: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    for key, value in values.items():
        if isinstance(value, dict):
            if key.endswith("config"):
                yield from leaves(value, f"{prefix}{key}.")
        elif not IRRELEVANT.fullmatch(key):
            yield f"{prefix}{key}", value


def part_of(raw: Values, path: str) -> Any:
    """Return the part of a config that contains a key. Raises KeyError."""
    part: Any = raw
    for name in path.split(".")[:-1]:
        part = part[name]
    return part


def changed(raw: Values, path: str, value: Json) -> Values | None:
    """Return a config with another value, or None if the config has no such part.

    If the value is a number of layers, lists with an entry for each layer get the new length.
    """
    raw, key = copy.deepcopy(raw), path.rpartition(".")[2]
    try:
        part = part_of(raw, path)
    except KeyError:
        return None
    old = part.get(key)
    if is_number(old) and is_number(value) and LAYERS.search(key):
        for name, each in list(part.items()):
            if isinstance(each, str) and "pattern" not in name:
                continue
            if isinstance(each, list | str) and len(each) == old > 1 and isinstance(value, int):
                part[name] = (each * (1 + value // old))[:value]
    part[key] = value
    return raw


def variations(path: str, value: Json, layers: set[int]) -> Iterator[list[Any]]:
    """Yield lists of other values for a key.

    Of each list, the first value that makes a model is used.
    """
    if isinstance(value, bool):
        yield [not value]
    elif isinstance(value, int):
        yield [2 * value, value // 2, value + 1, value - 1] if value > 1 else [value + 1, 2, 4]
        yield (
            [value + 1, 3 * value, value // 2, value - 1, 4 * value] if value > 1 else [2, 4, 8, 0]
        )
        yield from ([0, value - 1], [None]) if value > 0 else ()
    elif isinstance(value, float):
        yield from ([2 * value], [value / 2])
    elif value is None and "pattern" in path:
        yield from (["M-*EM-"], ["*EM-*M"], [2], [3])
    elif value is None:
        yield from ([64, 8], [32, 16], [2], [3], [True], [False])
    elif isinstance(value, list):
        yield from variations_of_list(value, layers)


def variations_of_list(value: list[Any], layers: set[int]) -> Iterator[list[Any]]:
    """Yield lists of other values for a list of words or of numbers, as `variations` does."""
    if any(isinstance(each, str) for each in value):
        yield from ([[*value[1:], value[0]]], [[*value, value[-1]]])
        for other in dict.fromkeys((*value, *LISTED)):
            yield from ([[other] * len(value)], [[*value[:-1], other]], [[other, *value[1:]]])
    elif value and all(each in (0, 1) for each in value):
        yield from ([[1 - value[0], *value[1:]]], [[*value[:-1], 1 - value[-1]]])
    elif all(map(is_number, value)):
        if len(value) in layers:
            yield from ([[2 * each for each in value]], [[2 * value[0], *value[1:]]])
        else:
            yield [[2 * each for each in value], [each // 2 for each in value]]
        yield from ([[]], [[0]], [[1]], [[0, 2]], [[1, 2, 3]])


def aliased_key(path: str, before: Sample, after: Sample) -> str:
    """Return the key that a config sets if `path` is another name of that key."""
    holder, old, new = path.rpartition(".")[0], before.keys, after.keys
    others = (
        key
        for key, value in new.items()
        if key != path
        and key.rpartition(".")[0] == holder
        and value == new.get(path) is not None
        and old.get(key) != value
    )
    return next(others, path) if old.get(path) is None else path
