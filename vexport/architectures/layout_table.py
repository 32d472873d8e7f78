"""Names and shapes of each class's tensors, computed from a config.

scripts/generate_layouts.py generates the table.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import prod

from vexport.architectures.config import Unknown, evaluate, size, wrapped
from vexport.architectures.tables import read_lines
from vexport.records import Json
from vexport.version import PINNED, Version

# The path of a key in a config: the keys of the outer configs, then the key, with dots
# between them.
PATH = re.compile(r"[A-Za-z_][\w.]*")
# The key under which transformers stores settings that apply to single layers. The expressions in
# the table do not use these settings.
PER_LAYER = "per_layer_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """Tensors of the same kind and shape.

    `names` are their names with `*` for numbers. `condition` is an expression that is true for the
    layers with these tensors, and `shape` has an expression for each side. In expressions, `i` is
    the number of the layer (the first `*`), and `layers` the number of layers. If an expression is
    empty or a shape is None, its value is unknown.

    `kind` describes what the tensors become in vLLM. For a weight it is the kind of the module
    (`ModuleKind`). Other kinds are "experts", "norm", "norm above one" (the norm multiplies by its
    weight plus one) and "dropped". All other tensors have the kind "".
    """

    names: Sequence[str]
    condition: str = "1"
    shape: Sequence[str] | None = None
    kind: str = ""

    @property
    def holds_head(self) -> bool:
        """True if these are the tensors of an output head.

        A checkpoint may contain them even if the head is tied to the embeddings.
        """
        return self.kind == "head" or any(name.endswith("lm_head.weight") for name in self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLayout:
    """Tensors of a class.

    Attributes:
        types: The model types of the config (key "") and of its nested configs (their paths). If a
            nested config has another model type, the tensors are unknown.
        counts: An expression for the number of layers or experts at each `*`. The key is the part
            of the name from the beginning to the `*`, such as `model.layers.*`.
        defaults: An expression for the value of each key, if the config lacks the key.
        nulls: An expression for the value of each key, if the key is null in the config.
        lists: Rules that create a list of words, such as `layer_types`, if the config lacks the key
            or it is null. The rule under "" is the length of the list. Each other rule maps a word
            to a condition. The word is at position `i` if its condition is true for `i`.
        aliases: Other names of a key.
        drops: Modules (with stars, "" for the model) in which vLLM ignores unknown names.
        rows: The tensors.
    """

    types: Mapping[str, str]
    counts: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    nulls: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    drops: frozenset[str] = frozenset()
    rows: tuple[LayoutRow, ...] = ()

    @property
    def keys(self) -> frozenset[str]:
        """Paths of all config keys that affect numbers or sizes of tensors."""
        sides = (side for row in self.rows for side in row.shape or ())
        texts = (*self.counts.values(), *sides, *(row.condition for row in self.rows))
        used = {path for text in texts for path in PATH.findall(text)}
        names = {path: self.aliases.get(path, ()) for path in used}
        return frozenset(used.union(*(aliases for aliases in names.values())))

    def matches_config(self, config: Mapping[str, Json]) -> bool:
        """Return True if the layout describes the tensors of a model with this config.

        The model types of nested configs must match `types`, and no config may have settings for
        single layers (PER_LAYER).
        """
        for path, kind in self.types.items():
            part: Json = {**config}
            for key in path.split(".") if path else ():
                part = part.get(key) if isinstance(part, dict) else None
            if isinstance(part, dict) and (
                part.get(PER_LAYER) or path and part.get("model_type", kind) != kind
            ):
                return False
        return True


class ConfigValues(Mapping[str, object]):
    """Values of a config, with the aliases and defaults that transformers uses.

    In expressions, a value of a nested config is an attribute: `text_config.hidden_size`.
    """

    def __init__(
        self,
        config: Mapping[str, Json],
        layout: ClassLayout,
        *,
        outer: "ConfigValues | None" = None,
        path: str = "",
    ) -> None:
        self._config, self._layout, self._path = config, layout, path
        self._outer = self if outer is None else outer
        self._known: dict[str, object] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)

    def __getattr__(self, key: str) -> object:
        return self[key]

    def __getitem__(self, key: str) -> object:
        if key in ("i", "layers", "len"):
            raise KeyError(key)
        if key not in self._known:
            self._known[key] = self._read(key)
        return self._known[key]

    def _read(self, key: str) -> object:
        """Return the value of a key, of one of its aliases, or the default (see `ClassLayout`)."""
        path = f"{self._path}{key}"
        names = (key, *self._layout.aliases.get(path, ()))
        value = next(
            (self._config[name] for name in names if self._config.get(name) is not None), None
        )
        if isinstance(value, dict):
            return ConfigValues(value, self._layout, outer=self._outer, path=f"{path}.")
        if value is not None:
            return wrapped(value)
        if path in self._layout.lists:
            return wrapped(self._listed(path))
        fallbacks = self._layout.nulls if key in self._config else self._layout.defaults
        return evaluate(fallbacks[path], self._outer) if path in fallbacks else None

    def _listed(self, path: str) -> Json:
        """Return the list for a key in `lists`. Raises Unknown if no rule fits a position."""
        rules = self._layout.lists[path]
        layers = size(rules[""], self._outer)
        words: list[str | None] = []
        for i in range(min(layers, 1 << 16)):
            holds = (
                word
                for word, rule in rules.items()
                if word and evaluate(rule, self._outer, i=i, layers=layers)
            )
            words.append(next(holds, None))
        if None in words:
            raise Unknown(path)
        return [*words]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A tensor that a class has, or may have.

    `shape` is None if it is unknown, and has None for each unknown size.
    """

    shape: tuple[int | None, ...] | None
    kind: str
    optional: bool = False


def expected_tensors(
    layout: ClassLayout, config: Mapping[str, Json], most: int
) -> tuple[dict[str, Expected], set[str]]:
    """Return the tensors that a config implies, and the names (with `*`) of uncertain tensors.

    A name is also uncertain if it stands for so many tensors that the total would exceed `most`.
    """
    values, found, unsure = ConfigValues(config, layout), dict[str, Expected](), set[str]()
    for row in layout.rows:
        for name in row.names:
            try:
                found.update(_tensors(name, row, layout, values, most - len(found)))
            except Unknown:
                unsure.add(name)
    return found, unsure


def _tensors(
    name: str, row: LayoutRow, layout: ClassLayout, values: ConfigValues, most: int
) -> Iterator[tuple[str, Expected]]:
    """Yield the tensors with a name pattern, for all layers and experts that have them.

    Raises Unknown if a number or a condition is unknown, or if there are more than `most` tensors.
    """
    parts = name.split(".")
    stars = [at for at, part in enumerate(parts) if part == "*"]
    counts = [size(layout.counts[".".join(parts[: at + 1])], values) for at in stars]
    if not row.condition or prod(counts) > most:
        raise Unknown(name)
    layers = counts[0] if counts else -1
    for i in range(layers) if counts else (-1,):
        holds = bool(evaluate(row.condition, values, i=i, layers=layers))
        if holds or row.holds_head:
            shape = _shape(row, values, i, layers)
            # A scalar without a kind is a bound or a factor with a default, so it may be missing.
            optional = not holds or row.kind == "dropped" or shape == () and not row.kind
            each = Expected(shape=shape, kind=row.kind, optional=optional)
            for rest in product(*map(range, counts[1:])):
                for at, number in zip(stars, (i, *rest), strict=False):
                    parts[at] = str(number)
                yield ".".join(parts), each


def _shape(
    row: LayoutRow, values: ConfigValues, i: int, layers: int
) -> tuple[int | None, ...] | None:
    if row.shape is None:
        return None
    sides = tuple(size(side, values, i=i, layers=layers) if side else None for side in row.shape)
    # A config sets a size to 0 if another key replaces it, or if the model does not use it.
    if 0 in sides:
        raise Unknown(row.names[0])
    return sides


@cache
def layout_entries(version: Version = PINNED) -> Mapping[str, str]:
    """Return the layout of each class as JSON text."""
    return read_lines("layouts.json", version)


@cache
def get_layout(name: str, version: Version = PINNED) -> ClassLayout | None:
    """Return the layout of a class, or None if its tensors are unknown."""
    entry = layout_entries(version).get(name)
    if entry is None:
        return None
    values = json.loads(entry)
    rows = tuple(LayoutRow(**row) for row in values.pop("rows"))
    return ClassLayout(**{**values, "drops": frozenset(values.get("drops", ()))}, rows=rows)
