"""Parse arguments of vLLM on the command line: KEY=VALUE, or a JSON object with several arguments.

`--serve` and `--engine-arg` accept the same texts and give the same errors.
"""

import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pydantic import JsonValue

EngineArguments = dict[str, "JsonValue"]
# First characters of a JSON object, and of a JSON object or list. A text value of vLLM never begins
# with them, so a value that does is JSON or a mistake.
_OBJECT = "{"
_NESTED = ("{", "[")


def parse_arguments(text: str) -> EngineArguments:
    """Parse KEY=VALUE or a JSON object. Return the arguments under vLLM's names.

    `--max-num-seqs=4` gives the argument `max_num_seqs`. A value that is not valid JSON stays text,
    but it is an error if it begins with `{` or `[`. This is a type for click.

    Raises BadParameter for invalid JSON (also NaN, Infinity and too large numbers), and for a name
    with two different values.
    """
    if text.lstrip().startswith(_OBJECT):
        try:
            given = parse_json(text)
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is not a JSON object ({error}).") from None
        assert isinstance(given, dict)
        return merged_arguments([{_argument_name(name, text): given[name]} for name in given])
    name, sign, value = text.partition("=")
    if not sign:
        raise _not_an_argument(text)
    return {_argument_name(name, text): _parse_value(name.strip(), value)}


def merged_arguments(parts: Iterable[EngineArguments]) -> EngineArguments:
    """Join arguments. Raise BadParameter if an argument has two different values."""
    arguments: EngineArguments = {}
    for part in parts:
        for name, value in part.items():
            if name in arguments and not _is_same(arguments[name], value):
                old = json.dumps(arguments[name])
                raise click.BadParameter(f"{name} has two values: {old} and {json.dumps(value)}.")
            arguments[name] = value
    return arguments


def _argument_name(name: str, text: str) -> str:
    """Return vLLM's name of an argument that may be written like an option of `vllm serve`."""
    plain = name.strip().removeprefix("--").replace("-", "_")
    if not plain:
        raise _not_an_argument(text)
    return plain


def _not_an_argument(text: str) -> click.BadParameter:
    return click.BadParameter(
        f"{text!r} is neither KEY=VALUE like kv_cache_dtype=fp8 nor a JSON object."
    )


def _parse_value(name: str, text: str) -> "JsonValue":
    """Return a value parsed as JSON, or as text if it is not JSON.

    Raises BadParameter if the text begins with `{` or `[` and is not JSON.
    """
    try:
        return parse_json(text)
    except _NotAllowed as error:
        raise click.BadParameter(f"{name}={text}: {error}.") from None
    except ValueError as error:
        if text.lstrip().startswith(_NESTED):
            raise click.BadParameter(f"{name}={text}: the value is not JSON ({error}).") from None
        return text


class _NotAllowed(ValueError):
    """A value that Python's parser accepts, but that is not valid here."""


def parse_json(text: str) -> "JsonValue":
    """Parse JSON strictly.

    Raises ValueError for invalid JSON, for NaN, Infinity and too large numbers, and for a key with
    two different values.
    """
    try:
        value: JsonValue = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise _NotAllowed("the value is nested too deeply") from None
    except UnicodeEncodeError:
        raise _NotAllowed("the value has half of a surrogate pair, which is no character") from None
    return value


def _unique_keys(pairs: list[tuple[str, "JsonValue"]]) -> EngineArguments:
    """Return the object of these pairs. Raise ValueError if a key has two different values."""
    content: EngineArguments = {}
    for name, value in pairs:
        if name in content and not _is_same(content[name], value):
            raise _NotAllowed(f"it has the key {name!r} twice")
        content[name] = value
    return content


def _is_same(old: "JsonValue", new: "JsonValue") -> bool:
    """Return True if two values are equal in JSON, where `true` is not 1."""
    return json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True)


def _refuse_constant(name: str) -> float:
    raise _NotAllowed(f"{name} is not a valid JSON number")


def _finite(text: str) -> float:
    """Return a finite number. Raise ValueError if the number is too large for a float."""
    number = float(text)
    if not math.isfinite(number):
        raise _NotAllowed(f"{text} is too large for a number")
    return number
