"""Read the tables in `generated/`, for each version of vLLM that has tables.

The tables of `PINNED` are complete. The tables of another version are in
`generated/versions/MAJOR.MINOR/`. They contain only the entries that differ from the tables of
`PINNED`.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files

from vexport.records import Json
from vexport.version import PINNED, Version, short_version

FOLDER = files("vexport.architectures").joinpath("generated")
VERSIONS = FOLDER.joinpath("versions")


@cache
def table_versions() -> tuple[Version, ...]:
    """Return the versions of vLLM that have tables, the oldest first."""
    names = (entry.name for entry in VERSIONS.iterdir() if entry.is_dir())
    parts = (name.split(".") for name in names if name.replace(".", "").isdecimal())
    return tuple(sorted({PINNED, *((int(major), int(minor)) for major, minor in parts)}))


def read_table(file: str, version: Version) -> dict[str, Json]:
    """Return a table for a version of vLLM.

    If this version has no tables, return the table of `PINNED`.
    """
    table: dict[str, Json] = json.loads(FOLDER.joinpath(file).read_text(encoding="utf-8"))
    changes: dict[str, Json] = json.loads(_changes(file, version) or "{}")
    for key, value in changes.items():
        entries = table.get(key)
        table[key] = _merged(entries, value) if isinstance(entries, dict) else value
    return table


def read_lines(file: str, version: Version) -> dict[str, str]:
    """Return the entries of a table as JSON text, by name.

    The table has one line for each entry. The lines are not parsed, because a process needs few of
    them, and parsing all layouts takes longer than a check.
    """
    text = FOLDER.joinpath(file).read_text(encoding="utf-8")
    entries = {**dict(_entries(text)), **dict(_entries(_changes(file, version)))}
    return {name: entry for name, entry in entries.items() if entry != "null"}


def _entries(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if line.startswith("  "):
            name, _, entry = line.strip().rstrip(",").partition(": ")
            yield json.loads(name), entry


def _changes(file: str, version: Version) -> str:
    place = VERSIONS.joinpath(short_version(version), file)
    return place.read_text(encoding="utf-8") if place.is_file() else ""


def _merged(entries: Mapping[str, Json], changes: Json) -> Json:
    """Return the entries with the changes. A removed entry is null in the changes."""
    assert isinstance(changes, dict)
    return {name: entry for name, entry in {**entries, **changes}.items() if entry is not None}
