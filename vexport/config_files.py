"""Read YAML and TOML with limits on size, number of values and depth.

These files may come from other people. Aliases of YAML are refused, because each alias repeats
everything below its anchor: a few hundred bytes can mean billions of values. None of lm-eval's
tasks has aliases. Scenarios, recipes, tasks and options are all read here.
"""

import re
import tomllib
from collections.abc import Hashable, Mapping
from pathlib import Path

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from vexport.errors import InputError, convert_os_error
from vexport.files import require_no_device
from vexport.rules import file as rules
from vexport.words import clip

MOST_BYTES = 4_000_000
"""Maximum size of a YAML file."""
MOST_VALUES = 100_000
"""Maximum number of values in a YAML file. A long scenario has hundreds."""
MOST_LEVELS = 100
"""Maximum depth of nested lists and mappings."""
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


class BoundedLoader(Composer, _Parser, SafeConstructor, Resolver):
    """Loads YAML without Python objects and aliases, within the limits above.

    `name` is the path of the file, for constructors of tags.
    """

    def __init__(self, text: str, name: str) -> None:
        _Parser.__init__(self, text)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self.name = name
        self._values = 0
        self._level = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node and all nodes below it."""
        event = self.peek_event()
        assert event is not None, "a node begins with an event"
        mark: yaml.Mark = event.start_mark  # type: ignore[assignment]  # libyaml's has the same attributes
        if isinstance(event, yaml.AliasEvent):
            raise _marked(
                f"the alias *{clip(str(event.anchor), 100)} in the place of a value", mark
            )
        self._values += 1
        self._level += 1
        if self._values > MOST_VALUES:
            raise _marked(f"more than {MOST_VALUES:,} values", mark)
        if self._level > MOST_LEVELS:
            raise _marked(f"more than {MOST_LEVELS} levels", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        digits = len(node.value) if node is not None and node.tag in _NUMBERS else 0
        if digits > _MOST_DIGITS:
            raise _marked(f"a number of {digits:,} digits", mark)
        self._level -= 1
        return node


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
    return parse_yaml(_read(path, MOST_BYTES, need), path, loader)


def parse_yaml(
    data: bytes | str, path: Path, loader: type[BoundedLoader] = UniqueKeysLoader
) -> object:
    """Return the content of YAML that was read from `path`.

    Raises:
        InputError: If the YAML is invalid or exceeds the limits.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
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
