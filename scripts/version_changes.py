"""Write the tables of a version of vLLM as changes of the tables of the pinned version.

    PYTHONPATH=. .venv/bin/python scripts/version_changes.py FOLDER

FOLDER has whole tables, made by the generators in an environment with that version. Entries that
differ from the tables in `vexport/architectures/generated/` are written into its subfolder
`versions/MAJOR.MINOR/` and printed in words.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tables import FOLDER, write_table

# The tables, with the words for their entries and the keys that hold an object of entries.
TABLES = {
    "vllm.json": ("class", ("text_models", "left_out", "architectures")),
    "modules.json": ("class whose modules were built", ("classes",)),
    "layouts.json": ("class whose tensors are known", ("unknown", "classes")),
    "transformers.json": ("model type of transformers", ("models",)),
}
# The most names and values that are printed for a change. The files have all of them.
MOST_NAMES, MOST_CHARACTERS = 12, 100


def main() -> None:
    """Write the changes of each table that the folder has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="The folder with the tables of a version.")
    folder = parser.parse_args().folder
    version = json.loads((folder / "vllm.json").read_text())["vllm"]
    target = FOLDER / "versions" / ".".join(version.split(".")[:2])
    target.mkdir(exist_ok=True)
    for name, (entry, keys) in TABLES.items():
        if not (folder / name).is_file():
            print(f"{name}: not made, so that the pinned version's table is used")
            continue
        pinned, new = (json.loads((place / name).read_text()) for place in (FOLDER, folder))
        changes = {key: new[key] for key in new if new[key] != pinned.get(key)}
        for key in keys:
            changes[key] = changed_entries(pinned[key], new[key])
        # Write a line for each entry of the last key. Readers can parse a line without parsing the
        # others.
        write_table(target / name, changes, keys[-1])
        print("\n".join([f"{name}:", *described(entry, pinned, changes, keys)]))


def changed_entries(pinned: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that differ. The value is None for a removed entry."""
    return {
        name: new.get(name)
        for name in sorted(pinned.keys() | new.keys())
        if pinned.get(name) != new.get(name)
    }


def described(
    entry: str, pinned: Mapping[str, Any], changes: Mapping[str, Any], keys: tuple[str, ...]
) -> Iterator[str]:
    """Yield a line for each kind of change, and for each field of an entry that changed."""
    for key in changes.keys() - {*keys}:
        if not isinstance(changes[key], list):
            yield f"  {key}: {pinned.get(key)} -> {changes[key]}"
    for key in keys:
        before = pinned[key]
        added = [name for name in changes[key] if name not in before]
        gone = [name for name, value in changes[key].items() if value is None]
        for word, names in (("new", added), ("gone", gone)):
            if names:
                more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
                yield f"  {key}, {word} {entry}: {', '.join(names[:MOST_NAMES])}{more}"
        for name, value in changes[key].items():
            if name not in added and value is not None:
                yield from (f"  {key}, {name}: {line}" for line in fields(before[name], value))


def fields(before: Any, after: Any) -> Iterator[str]:
    """Yield the changes of an entry, by its fields if it has any."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        yield f"{shown(before)} -> {shown(after)}"
        return
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{key}: {shown(before.get(key))} -> {shown(after.get(key))}"


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


if __name__ == "__main__":
    main()
