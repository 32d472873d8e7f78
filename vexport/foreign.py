"""Read numbers, names and texts from files that other people wrote.

All readers of results, accepted baselines and stored responses use these functions, so that a
value is usable, or an InputError with its file, row and field. Such files contain numbers with
thousands of digits, infinite numbers, halves of surrogate pairs, doubled fields and ranges without
end.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import BinaryIO

from vexport.errors import InputError, require_working_disk
from vexport.files import require_no_device
from vexport.records import Json
from vexport.records.values import json_type
from vexport.rules import file as rules
from vexport.words import clip, shown

LONGEST_LINE = 1 << 26
"""Most bytes in a line of JSON. Calibration data has the same limit."""
LARGEST_SCORE = 1e50
"""Largest absolute value of a score.

A verdict computes third powers of the scores of all documents, and a float ends at 1.8e308.
"""
# Most levels of lists and objects in a row. Python's own limit depends on the caller.
_MOST_LEVELS = 100
# Most digits of a number that is parsed. A float can hold every such number.
_MOST_DIGITS = 308
_WHOLE = re.compile(r"0|[1-9][0-9]{0,17}")
_SPAN = re.compile(r"([0-9]{1,15})-([0-9]{1,15})")
# Spellings of halves of surrogate pairs: escaped, and as bytes.
_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def json_lines(path: Path, need: str) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield (file:line, JSON object) for every line. `need` describes a valid line in errors.

    Raises:
        InputError: If the file cannot be read, or a line is too long or not a JSON object.
    """
    require_no_device(path)
    try:
        with path.open("rb") as file:
            for number, line in _lines(path, file):
                where = f"{path}:{number}"
                yield where, json_object(line, where, need)
    except OSError as error:
        require_working_disk(error, path)
        reason = error.strerror or error
        raise InputError.of(rules.UNREADABLE, str(path), reason=reason) from None


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise InputError.of(rules.LONG_LINE, f"{path}:{number}", most=LONGEST_LINE >> 20)
        yield number, line


def json_object(content: bytes, where: str, need: str) -> dict[str, Json]:
    """Parse a JSON object. Halves of surrogate pairs in its texts become `?`.

    Raises:
        InputError: If the content is not an object, is nested too deeply or has a field twice.
    """
    doubled = ""

    def fields(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        nonlocal doubled
        found = dict(pairs)
        names = [name for name, _ in pairs]
        twice = len(found) < len(pairs)
        doubled = next(name for name in names if names.count(name) > 1) if twice else ""
        return found

    try:
        value: Json = json.loads(content, parse_int=parsed_number, object_pairs_hook=fields)
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise InputError.of(rules.DEPTH, where, most=_MOST_LEVELS) from None
        raise InputError.of(rules.JSON, where, reason=error, need=need) from None
    if not isinstance(value, dict):
        raise InputError.of(rules.JSON_OBJECT, where, kind=json_type(value), need=need)
    if doubled:  # of the whole row, whose object is complete last
        raise InputError.of(rules.FIELD_TWICE, where, name=shown(doubled, 100))
    if content.count(b"[") + content.count(b"{") > _MOST_LEVELS and _is_deep(value):
        raise InputError.of(rules.DEPTH, where, most=_MOST_LEVELS)
    if _SURROGATES.search(content):
        cleaned = _cleaned(value)
        assert isinstance(cleaned, dict)
        return cleaned
    return value


def usable_json(value: Json, where: str) -> Json:
    """Return a parsed value. Halves of surrogate pairs in its texts become `?`.

    Raises:
        InputError: If the value is nested too deeply.
    """
    if _is_deep(value):
        raise InputError.of(rules.DEPTH, where, most=_MOST_LEVELS)
    return _cleaned(value)


def parsed_number(digits: str) -> int | float:
    """Return a whole number, or an infinite number if it has too many digits for a float."""
    if len(digits) <= _MOST_DIGITS:
        return int(digits)
    return -math.inf if digits.startswith("-") else math.inf


def _is_deep(value: Json) -> bool:
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _cleaned(value: Json) -> Json:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list):
        return [_cleaned(entry) for entry in value]
    if isinstance(value, dict):
        return {text(key): _cleaned(entry) for key, entry in value.items()}
    return value


def require_unique_fields(path: Path) -> None:
    """Raise InputError if an object in a JSON file has a field twice, as after a merge."""

    def fields(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found: dict[str, Json] = {}
        for name, value in pairs:
            if name in found:
                raise InputError.of(rules.FIELD_TWICE, str(path), name=shown(name, 100))
            found[name] = value
        return found

    json.loads(path.read_bytes(), object_pairs_hook=fields)


def require_fields(
    where: str, row: Mapping[str, Json], kinds: Mapping[str, type | UnionType], need: str
) -> None:
    """Raise InputError if a row lacks fields, or if their values have other types than `kinds`.

    `need` describes a valid row.
    """
    names = [
        name for name, kind in kinds.items() if name not in row or not isinstance(row[name], kind)
    ]
    if names:
        raise InputError.of(rules.FIELDS, where, names=names, need=need)


def mapping_in(content: Mapping[str, Json], *keys: str) -> dict[str, Json]:
    """Return the object below nested keys. Return an empty object for any other value."""
    found: Json = dict(content)
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def number(where: str, name: str, value: object) -> float:
    """Return a score as a float. A truth value is 0 or 1.

    Raises:
        InputError: If the value is no number, is not finite or is beyond LARGEST_SCORE.
    """
    if not isinstance(value, bool | int | float):
        raise InputError.of(rules.NUMBER, where, name=name, value=shown(value, 100))
    found = float(value)
    if not math.isfinite(found):
        raise InputError.of(rules.FINITE_NUMBER, where, name=name, value=found)
    if abs(found) > LARGEST_SCORE:
        raise InputError.of(
            rules.NUMBER_RANGE,
            where,
            name=name,
            value=found,
            low=-LARGEST_SCORE,
            high=LARGEST_SCORE,
        )
    return found


def whole_number(where: str, name: str, value: object) -> int:
    """Return a whole number from 0. Raises InputError for any other value."""
    if type(value) is not int or value < 0:
        raise InputError.of(rules.WHOLE_NUMBER, where, name=name, value=shown(value, 100))
    return value


def identity(where: str, name: str, value: object) -> str:
    """Return a document's id as text, so that 7 and "7" are the same document.

    Raises:
        InputError: If the value is no whole number and no text.
    """
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise InputError.of(rules.IDENTITY, where, name=name, value=shown(value, 100))
    return text(value)


def is_whole_number(digits: str) -> bool:
    """Return True if a text is a number from 0 as it is usually written, of at most 18 digits."""
    return _WHOLE.fullmatch(digits) is not None


def span(words: str) -> range:
    """Return the numbers of a range such as `0-99`. Raises ValueError for any other text."""
    found = _SPAN.fullmatch(words)
    if found is None:
        raise ValueError(f"{clip(words, 60)} instead of a range such as 0-99")
    return range(int(found[1]), int(found[2]) + 1)


def text(value: object) -> str:
    """Return a value as text that can be stored as UTF-8. Halves of surrogate pairs become `?`."""
    words = str(value)
    return words if words.isascii() else words.encode("utf-8", "replace").decode()
