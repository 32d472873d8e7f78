"""Find and remove the files that vexport wrote to a checkpoint or to a working folder.

A checkpoint's recipe lists its files. Files are removed one by one, so that other files stay.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.outputs import RECIPE
from vexport.outputs.manifest import (
    MANIFEST,
    is_temporary_manifest,
    remove_recorded,
    unlisted_entries,
)

# Key of vexport.json for the names of the written files.
FILES = "files"
# Contents of a working folder, in addition to the manifest; see outputs/resumable.py.
RECORD, NEW, OLD, ASIDE = ".made-from", "new", "old", "aside"


def is_folder(path: Path) -> bool:
    """Return True if a path is a folder and not a link."""
    return path.is_dir() and not path.is_symlink()


def unowned_entries(folder: Path, owned: Collection[str]) -> list[str]:
    """Return the files below a checkpoint's folder that are not in `owned`, and empty folders.

    Links count as other files, because vexport writes none.
    """
    found = []
    for entry in sorted(folder.rglob("*")):
        name = entry.relative_to(folder).as_posix()
        is_empty = is_folder(entry) and not any(entry.iterdir())
        if is_empty or entry.is_symlink() or (not entry.is_dir() and name not in owned):
            found.append(name)
    return found


def checkpoint_files(folder: Path) -> frozenset[str] | None:
    """Return the names of vexport's files in a checkpoint's folder, or None if there are none."""
    try:
        files = read_json_object(folder / RECIPE).get(FILES)
    except InputError:
        return None
    if not isinstance(files, list):
        return None
    return frozenset(name for name in files if isinstance(name, str)) | {RECIPE}


def remove_checkpoint(folder: Path) -> None:
    """Remove the files that a checkpoint's recipe lists, the recipe last, then empty folders."""
    names = sorted(checkpoint_files(folder) or (), key=lambda name: (name == RECIPE, name))
    for name in names:
        file = folder / name
        if (
            file.is_file()
            and not file.is_symlink()
            and file.resolve().is_relative_to(folder.resolve())
        ):
            file.unlink()
    for inner in sorted((entry for entry in folder.rglob("*") if is_folder(entry)), reverse=True):
        with suppress(OSError):
            inner.rmdir()
    with suppress(OSError):  # something else was added
        folder.rmdir()


def foreign_entries(work: Path) -> list[Path]:
    """Return the entries of a working folder that vexport did not write.

    Returns the folder itself if it is a link, not a folder, or another user's folder.

    vexport writes the record first. Without a record, no file in the folder is vexport's.
    """
    if work.is_symlink() or not work.is_dir() or not _belongs_to_user(work):
        return [work]
    entries = list(_foreign_at_top(work))
    parts = [work / name for name in (NEW, ASIDE, OLD)]
    entries += [
        entry for part in parts for entry in sorted(part.rglob("*")) if not _belongs_to_user(entry)
    ]
    if (work / RECORD).exists() and (work / RECORD).stat().st_size:
        entries += [
            work / name for part in (NEW, ASIDE) for name in unlisted_entries(work, work / part)
        ]
        owned = checkpoint_files(work / OLD) or frozenset()
        entries += [work / OLD / name for name in unowned_entries(work / OLD, owned)]
    else:
        entries += [
            entry for part in parts for entry in sorted(part.rglob("*")) if not is_folder(entry)
        ]
    return list(dict.fromkeys(entries))


def _foreign_at_top(work: Path) -> Iterator[Path]:
    for entry in sorted(work.iterdir()):
        known = entry.name in (RECORD, MANIFEST, NEW, OLD, ASIDE) or is_temporary_manifest(entry)
        if not known or not _belongs_to_user(entry) or entry.is_symlink():
            yield entry


def _belongs_to_user(entry: Path) -> bool:
    return entry.lstat().st_uid == os.geteuid()


def remove_unfinished(work: Path) -> None:
    """Remove the files of a working folder whose output was not finished, the record last.

    If `old` exists, it stays with the record, because it is the only copy of the earlier output.
    """
    for part in (work / NEW, work / ASIDE):
        remove_recorded(work, part)
        with suppress(OSError):  # not empty, or missing
            part.rmdir()
    if any((work / part).exists() for part in (NEW, ASIDE, OLD)):
        return
    for name in (MANIFEST, RECORD):
        (work / name).unlink(missing_ok=True)
    with suppress(OSError):
        work.rmdir()
