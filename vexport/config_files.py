"""Read YAML and TOML with limits on size, number of values and depth.

These files may come from other people. A few hundred bytes of YAML can mean billions of values,
because an alias repeats everything below its anchor. Scenarios, recipes, tasks and options are all
read here.
"""

import re
import tomllib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from vexport.errors import InputError, clip, convert_os_error
from vexport.files import require_no_device
from vexport.rules import file as rules

MOST_BYTES = 4_000_000
"""Maximum size of a YAML file.

The text of all values, with every alias written out, has the same limit.
"""
MOST_VALUES = 100_000
"""Maximum number of values in a YAML file, with aliases written out.

A long scenario has hundreds.
"""
MOST_LEVELS = 100
"""Maximum depth of nested lists and mappings, with every alias written out."""
MOST_TOML_BYTES = 1_000_000
MOST_KEY_PARTS = 20
"""Maximum parts of a dotted key in TOML, such as [tool.vexport.check].

tomllib needs time that is quadratic in the number of parts.
"""
# Python converts numbers with many digits slowly, and rejects numbers with more than 4,300 digits.
_MOST_DIGITS = 1000
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_KEY_PART = rb"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*"""
_LONG_KEY = re.compile(rb"(?:" + _KEY_PART + rb"\.[ \t]*){" + str(MOST_KEY_PARTS).encode() + rb"}")
# PyYAML's constructors raise these for a value that does not fit an explicit tag, such as `!!int
# ""`.
_WRONG_VALUES = (
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    ArithmeticError,
    RecursionError,
)

if yaml.__with_libyaml__:
    from yaml._yaml import CParser as _Parser
else:  # much slower, with the same results

    class _Parser(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser):  # type: ignore[no-redef]
        """PyYAML's parser in Python."""

        def __init__(self, stream: str) -> None:
            yaml.reader.Reader.__init__(self, stream)
            yaml.scanner.Scanner.__init__(self)
            yaml.parser.Parser.__init__(self)


@dataclass(frozen=True, slots=True)
class _Extent:
    """Size of a part of a file, with every alias written out."""

    values: int
    characters: int
    levels: int


class BoundedLoader(Composer, _Parser, SafeConstructor, Resolver):
    """Loads YAML without Python objects, and raises MarkedYAMLError beyond the limits above.

    `name` is the path of the file, for constructors of tags.
    """

    def __init__(self, text: str, name: str) -> None:
        _Parser.__init__(self, text)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self.name = name
        self._extents: dict[yaml.Node, _Extent] = {}
        self._values = 0
        self._characters = 0
        self._level = 0
        self._deepest = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node and all nodes below it, and count their values, characters and levels."""
        event = self.peek_event()
        assert event is not None, "a node begins with an event"
        mark: yaml.Mark = event.start_mark  # type: ignore[assignment]  # libyaml's has the same attributes
        anchor: str | None = event.anchor  # type: ignore[attr-defined]
        is_alias = isinstance(event, yaml.AliasEvent)
        values, characters, deepest = self._values, self._characters, self._deepest
        self._level += 1
        self._deepest = self._level
        self._require_bounded(mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        assert node is not None, "an event that begins a node gives a node"
        if is_alias:
            if node not in self._extents:
                raise _marked("an alias inside the value of its anchor", mark)
            extent = self._extents[node]
            self._values += extent.values
            self._characters += extent.characters
            self._deepest = self._level + extent.levels - 1
        else:
            self._values += 1
            self._characters += _length(node, mark)
            if anchor is not None:
                self._extents[node] = _Extent(
                    values=self._values - values,
                    characters=self._characters - characters,
                    levels=self._deepest - self._level + 1,
                )
        self._require_bounded(mark)
        self._level -= 1
        self._deepest = max(deepest, self._deepest)
        return node

    def _require_bounded(self, mark: yaml.Mark) -> None:
        written_out = "with every alias written out"
        if self._values > MOST_VALUES:
            raise _marked(f"more than {MOST_VALUES:,} values {written_out}", mark)
        if self._characters > MOST_BYTES:
            raise _marked(f"more than {MOST_BYTES:,} characters {written_out}", mark)
        if self._deepest > MOST_LEVELS:
            raise _marked(f"more than {MOST_LEVELS} levels {written_out}", mark)


def _length(node: yaml.Node, mark: yaml.Mark) -> int:
    """Return the number of characters of a scalar, and 0 for a list or mapping.

    Raises:
        MarkedYAMLError: If it is a number with too many digits.
    """
    if not isinstance(node, yaml.ScalarNode):
        return 0
    length = len(node.value)
    if node.tag in _NUMBERS and length > _MOST_DIGITS:
        raise _marked(f"a number of {length:,} digits", mark)
    return length


def _marked(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


class UniqueKeysLoader(BoundedLoader):
    """Loads YAML without repeated keys.

    PyYAML would silently use the last value of a repeated key.
    """

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        """Return the mapping of a node. Raise MarkedYAMLError if a key occurs twice."""
        keys = set[str]()
        for key, _ in node.value:
            name = repr(self.construct_object(key, deep=True))
            if name in keys:
                raise _marked(f"the repeated key {clip(name, 100)}", key.start_mark)
            keys.add(name)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path, need: str, loader: type[BoundedLoader] = UniqueKeysLoader) -> object:
    """Return the content of a YAML file.

    Raises:
        InputError: If the file cannot be read or exceeds the limits.
    """
    try:
        text = _read(path, MOST_BYTES, need).decode("utf-8-sig")
        content: object = loader(text, str(path)).get_single_data()
    except (yaml.YAMLError, *_WRONG_VALUES) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        got = clip(" ".join((problem or _described(error)).split()), 200)
        raise InputError.of(rules.YAML, where, reason=got) from None
    return content


def _described(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "values that are nested too deeply"
    if isinstance(error, yaml.YAMLError | ValueError):
        return str(error)
    return "a value that does not fit its tag"


def load_toml(path: Path) -> Mapping[str, object]:
    """Return the tables of a TOML file.

    Raises:
        InputError: If the file cannot be read or exceeds the limits.
    """
    data = _read(path, MOST_TOML_BYTES, "a TOML file")
    if long_key := _LONG_KEY.search(data):
        line = data.count(b"\n", 0, long_key.start()) + 1
        raise InputError.of(rules.TOML_KEY, f"{path}:{line}", most=MOST_KEY_PARTS)
    try:
        return tomllib.loads(data.decode("utf-8"))
    except RecursionError:
        got = "values that are nested too deeply"
    except ValueError as error:
        got = clip(str(error), 200)
    raise InputError.of(rules.TOML, str(path), reason=got)


def _read(path: Path, most: int, need: str) -> bytes:
    """Return the bytes of a file.

    Raises:
        InputError: If it is missing, not a file, or larger than `most` bytes.
    """
    try:
        require_no_device(path)
        with path.open("rb") as file:
            data = file.read(most + 1)
    except FileNotFoundError:
        raise InputError.of(rules.MISSING, str(path)) from None
    except OSError as error:
        raise convert_os_error(error) from None
    if len(data) > most:
        raise InputError.of(rules.TOO_LARGE, str(path), need=need, most=most // 10**6)
    return data
