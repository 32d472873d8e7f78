"""Tools in OpenAI's form: the tools that vexport ships, and a user's tools from a file."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.config_files import MOST_BYTES
from vexport.errors import InputError, raise_all
from vexport.errors.extras import require_extra
from vexport.files import read_json, require_no_device
from vexport.foreign import usable_json
from vexport.inference.shipped.base import JsonObject
from vexport.records import Json
from vexport.records.patterns import time_limit
from vexport.rules import file as file_rules
from vexport.rules import tools as rules

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_SHIPPED_FILE = Path(__file__).parent / "tools.json"
# Time limit for comparing arguments with a schema. A schema may have slow regular expressions.
_SECONDS = 5.0
NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}}


@cache
def shipped_tools() -> tuple[JsonObject, ...]:
    """Return the tools that vexport ships."""
    return tuple(json.loads(_SHIPPED_FILE.read_text(encoding="utf-8")))


def name_of(tool: JsonObject) -> str:
    return str(_function(tool)["name"])


def description_of(tool: JsonObject) -> str:
    return str(_function(tool).get("description") or "").strip()


def parameters_of(tool: JsonObject) -> JsonObject:
    """Return the JSON schema of the tool's arguments."""
    schema = _function(tool).get("parameters")
    return schema if isinstance(schema, Mapping) else NO_PARAMETERS


def _function(tool: JsonObject) -> JsonObject:
    function = tool["function"]
    assert isinstance(function, Mapping)
    return function


def schema_problem(arguments: Json, schema: JsonObject) -> str:
    """Return why the arguments do not fit the schema, or "" if they fit.

    References to other files or addresses are never followed.
    """
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    validator = _validator_class(schema)(schema, registry=Registry())
    try:
        with time_limit(_SECONDS):
            error = next(validator.iter_errors(arguments), None)
    except TimeoutError as limit:
        return f"a comparison that is {limit}"
    except (Unresolvable, RecursionError) as unresolved:
        return f"{type(unresolved).__name__}: {unresolved}"
    except (ValueError, TypeError, AttributeError):
        # jsonschema's errors if a reference leads to a value that is no schema, or into a text
        return "a reference of the schema leads to no schema"
    return "" if error is None else f"{error.json_path}: {error.message}"


def _validator_class(schema: JsonObject) -> "type[Validator]":
    """Return jsonschema's class for the version that the schema states, by default 2020-12."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    if not isinstance(schema.get("$schema"), str):
        return Draft202012Validator
    return validator_for(dict(schema), default=Draft202012Validator)


def read_tools(path: Path) -> tuple[JsonObject, ...]:
    """Read tools from a JSON file.

    Raises InputErrors for everything that is not a tool in OpenAI's form. The errors have the
    places in the file.
    """
    require_extra("jsonschema", "checking tools")
    require_no_device(path)
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        raise InputError.of(
            file_rules.TOO_LARGE, str(path), most=MOST_BYTES >> 20, need="a list of tools"
        )
    content = usable_json(read_json(path), str(path))
    if not isinstance(content, list) or not content:
        found = "an empty list" if content == [] else f"a JSON {type(content).__name__}"
        raise InputError.of(rules.FORM, str(path), found=found, need="a list of tools")
    raise_all([problem for at, tool in enumerate(content) for problem in _problems(path, at, tool)])
    tools = [tool for tool in content if isinstance(tool, dict)]
    raise_all([*_doubled(path, tools)])
    return tuple(tools)


def _problems(path: Path, at: int, tool: Json) -> Iterator[InputError]:
    where = f"{path}: [{at}]"
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        need = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
        yield InputError.of(rules.FORM, where, found="no key function", need=need)
        return
    function = tool["function"]
    assert isinstance(function, dict)
    if tool.get("type") != "function":
        found = f"the type {tool.get('type')!r}"
        yield InputError.of(rules.FORM, f"{where}.type", found=found, need='"function"')
    name = function.get("name")
    if not isinstance(name, str) or not name.isprintable() or not name or " " in name:
        need = "a text without spaces"
        yield InputError.of(rules.FORM, f"{where}.function.name", found=f"{name!r}", need=need)
    description = function.get("description")
    if not isinstance(description, str | None):
        need = "a text"
        place = f"{where}.function.description"
        yield InputError.of(rules.FORM, place, found=f"{description!r}", need=need)
    yield from _schema_problems(f"{where}.function.parameters", function.get("parameters"))


def _schema_problems(where: str, schema: Json) -> Iterator[InputError]:
    if schema is None:
        return
    if not isinstance(schema, dict):
        found = f"a JSON {type(schema).__name__}"
        yield InputError.of(rules.FORM, where, found=found, need="a JSON schema of an object")
        return
    from jsonschema.exceptions import SchemaError

    try:
        _validator_class(schema).check_schema(schema)
    except SchemaError as error:
        place = f"{where}{error.json_path.removeprefix('$')}"
        yield InputError.of(rules.SCHEMA, place, reason=error.message)
        return
    except RecursionError:
        yield InputError.of(rules.SCHEMA, where, reason="a schema that is nested too deeply")
        return
    if schema.get("type", "object") != "object":
        found = f"the type {schema.get('type')!r}"
        yield InputError.of(rules.FORM, f"{where}.type", found=found, need='"object"')


def _doubled(path: Path, tools: Sequence[JsonObject]) -> Iterator[InputError]:
    first: dict[str, int] = {}
    for at, tool in enumerate(tools):
        earlier = first.setdefault(name_of(tool), at)
        if earlier != at:
            where = f"{path}: [{at}].function.name"
            yield InputError.of(rules.TWICE, where, name=name_of(tool), first=f"[{earlier}]")
