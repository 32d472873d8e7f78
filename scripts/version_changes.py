"""Write the tables of a version of vLLM as changes of the tables of the pinned version.

    PYTHONPATH=. .venv/bin/python scripts/version_changes.py FOLDER

FOLDER has whole tables, made by the generators in an environment with that version. Entries that
differ from the tables in `vexport/architectures/generated/` are written into its subfolder
`versions/MAJOR.MINOR/` and printed in words. A condition or a size that the generator left open is
not a difference: the pinned table's expression stays.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tables import FOLDER, write_table

# The tables, with the words for their entries and the keys that hold an object of entries.
TABLES = {
    "vllm.json": ("class", ("text_models", "left_out", "architectures")),
    "modules.json": ("class whose modules were built", ("classes",)),
    "layouts.json": ("class whose tensors are known", ("unknown", "classes")),
    "transformers.json": ("model type of transformers", ("accepted", "models")),
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
            print(f"{name}: not made; the pinned version's table is used")
            continue
        pinned, new = (json.loads((place / name).read_text()) for place in (FOLDER, folder))
        changes = {key: new[key] for key in new if new[key] != pinned.get(key)}
        for key in keys:
            entries = new[key]
            if (name, key) == ("layouts.json", "classes"):
                entries = {
                    each: without_open_parts(pinned[key].get(each), entry)
                    for each, entry in entries.items()
                }
            changes[key] = changed_entries(pinned[key], entries)
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


def without_open_parts(pinned: Mapping[str, Any] | None, new: Mapping[str, Any]) -> Any:
    """Return a class's entry with the pinned entry's values for the parts that it leaves open.

    `pinned` and `new` are entries of `layouts.json`; `pinned` is None for a new class. The
    generator leaves a condition empty if it finds no expression that fits all samples, and some of
    those conditions were written into the pinned table by hand. Return the pinned entry itself if
    nothing else differs.
    """
    if pinned is None:
        return new
    stated, found = values_by_name(pinned["rows"]), values_by_name(new["rows"])
    merged: dict[str, list[dict[str, Any]]] = {}
    rows: list[dict[str, Any]] = []
    for row in new["rows"]:
        names_by_values: dict[str, list[str]] = {}
        for name in row["names"]:
            values = {key: value for key, value in row.items() if key != "names"}
            before = stated.get(name, [])
            number = len(merged.setdefault(name, []))
            # Rows of a tensor are paired by their order, which is only safe for as many rows.
            if len(before) == len(found[name]):
                values = filled(values, before[number])
            merged[name].append(values)
            names_by_values.setdefault(json.dumps(values), []).append(name)
        rows += [{"names": names, **json.loads(text)} for text, names in names_by_values.items()]
    defaults = {**pinned.get("defaults", {}), **new.get("defaults", {})}
    others = {key: value for key, value in new.items() if key not in ("rows", "defaults")}
    is_same = merged == stated and {**others, "defaults": defaults} == {
        **{key: value for key, value in pinned.items() if key != "rows"},
        "defaults": pinned.get("defaults", {}),
    }
    if is_same:
        return pinned
    entry = {**others, "rows": rows, "defaults": defaults}
    return {key: value for key, value in entry.items() if value}


def values_by_name(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the values of all rows of each tensor, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        values = {key: value for key, value in row.items() if key != "names"}
        for name in row["names"]:
            found.setdefault(name, []).append(values)
    return found


def filled(values: Mapping[str, Any], pinned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a row, with the pinned row's condition and sizes for the open ones.

    A condition that a row leaves out is `1`, and an empty condition or size is open.
    """
    result = dict(values)
    if result.get("condition") == "":
        result["condition"] = pinned.get("condition", "")
    sizes, stated = result.get("shape"), pinned.get("shape")
    if sizes and stated and len(sizes) == len(stated):
        result["shape"] = [size or other for size, other in zip(sizes, stated, strict=True)]
    return result


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
