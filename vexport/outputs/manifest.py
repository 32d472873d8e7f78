"""List of the files that vexport writes below a folder of results, to recognize its files later.

A name is added before its file is created. So the list is always complete, even after SIGKILL:
files that are not listed were written by somebody else. All processes of a call share the list.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from vexport.errors import InputError
from vexport.files import write_text
from vexport.rules import outputs as rules

MANIFEST = ".vexport-files"
# Number of folders above a file in which its manifest is searched. The deepest files need 6 levels:
# RUN/variants/candidate/VARIANT/tasks/NAME/NAME.yaml.
_LEVELS = 6
# Name of a file of `atomic_path` before it is complete. A killed call may leave such a file.
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}")


def begin_manifest(root: Path) -> None:
    """Write an empty manifest to a folder."""
    write_text(root / MANIFEST, "")


def record(file: Path) -> None:
    """Add a file to the manifest of the nearest folder above it, before the file is created.

    Without a manifest, nothing is recorded.
    """
    root = _owner(file)
    if root is None:
        return
    name = file.relative_to(root).as_posix()
    if name in recorded(root):
        return
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(root / MANIFEST, flags), "r+b") as manifest:
        content = manifest.read()
        # A killed call may have left an incomplete line.
        line_break = b"\n" if content and not content.endswith(b"\n") else b""
        manifest.write(line_break + json.dumps(name).encode() + b"\n")


def recorded(root: Path) -> frozenset[str]:
    """Return the names in a folder's manifest, relative to the folder.

    Without a manifest, no names are returned.
    """
    file = root / MANIFEST
    if file.is_symlink() or not file.is_file():
        return frozenset()
    names = set[str]()
    for line in file.read_bytes().splitlines():
        with suppress(ValueError, RecursionError):  # from an incomplete line
            name = json.loads(line)
            if isinstance(name, str):
                names.add(name)
    return frozenset(names)


def has_manifest(root: Path) -> bool:
    """Return True if a folder has a manifest. A link does not count."""
    return (root / MANIFEST).is_file() and not (root / MANIFEST).is_symlink()


def is_temporary_manifest(file: Path) -> bool:
    """Return True if a file is a manifest that a killed call did not finish."""
    temporary = _TEMPORARY.fullmatch(file.name)
    return temporary is not None and temporary["name"] == MANIFEST


def is_recorded(file: Path) -> bool:
    """Return True if vexport wrote a file or folder, even as a temporary file.

    Links are never vexport's.
    """
    root = _owner(file)
    if root is None or file.is_symlink():
        return False
    return _is_own(file, root, recorded(root))


def unlisted_entries(root: Path, below: Path, left_out: Iterable[Path] = ()) -> list[str]:
    """Return the entries below a folder that are not in the manifest of `root`, relative to `root`.

    A folder counts as listed if its files are listed. An empty folder counts as listed only if a
    listed file may be created in it. Folders in `left_out` are skipped.
    """
    return [
        file.relative_to(root).as_posix()
        for file in _unlisted_entries(root, below, recorded(root), {*left_out})
    ]


def _unlisted_entries(
    root: Path, below: Path, names: frozenset[str], left_out: set[Path]
) -> Iterator[Path]:
    for entry in sorted(below.iterdir()) if below.is_dir() else ():
        if entry in left_out:
            continue
        if entry.is_symlink() or not entry.is_dir():
            if entry.is_symlink() or not _is_own(entry, root, names):
                yield entry
        elif any(entry.iterdir()):
            yield from _unlisted_entries(root, entry, names, left_out)
        elif not _is_own(entry, root, names):
            yield entry


def remove_recorded(root: Path, below: Path, left_out: Iterable[Path] = ()) -> None:
    """Remove the files below a folder that the manifest in `root` lists, then empty folders."""
    names, kept = recorded(root), {*left_out}
    for entry in sorted(below.iterdir()) if below.is_dir() else ():
        if entry in kept or entry.is_symlink():
            continue
        if entry.is_dir():
            remove_recorded(root, entry, kept)
            with suppress(OSError):  # not empty: something else was added
                entry.rmdir()
        elif entry.name != MANIFEST and _is_own(entry, root, names):
            entry.unlink()


def require_manifest(root: Path) -> None:
    """Raise InputError for a folder without a manifest."""
    if not has_manifest(root):
        raise InputError.of(rules.NO_MANIFEST, str(root), manifest=MANIFEST, path=root)


def _is_own(entry: Path, root: Path, names: frozenset[str]) -> bool:
    name = entry.relative_to(root).as_posix()
    if name in names or name == MANIFEST or any(each.startswith(f"{name}/") for each in names):
        return True
    temporary = _TEMPORARY.fullmatch(entry.name)
    if temporary is None:
        return False
    final = entry.with_name(temporary["name"]).relative_to(root).as_posix()
    return final in names or final == MANIFEST


def _owner(file: Path) -> Path | None:
    """Return the nearest folder above a file that has a manifest."""
    return next((folder for folder in list(file.parents)[:_LEVELS] if has_manifest(folder)), None)
