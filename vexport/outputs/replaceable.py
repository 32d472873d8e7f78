"""The bounds of `--overwrite`: only what vexport wrote, and only where nothing else is with it.

Folders of results have a file that marks them as vexport's, and a list of what vexport writes there.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from vexport.errors import InputError
from vexport.files import read_json_object, write_text

# In a checkpoint that vexport wrote: how it was made, and under FILES the names of what was written.
RECIPE = "vexport.json"
FILES = "files"
SHOWN = 3


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """InputError where writing a checkpoint to `path` would replace what may not be replaced.

    Free are a path where nothing is and an empty folder; with `overwrite` also a checkpoint that vexport
    wrote, unless something else is in its folder.
    """
    if not is_filled_folder(path):
        return
    owned = checkpoint_files(path)
    if owned is None:
        raise not_ours(path, "a checkpoint that vexport wrote")
    refuse_others(path, others(path, owned.__contains__))
    if not overwrite:
        raise needs_overwrite(path)


def refuse_others(folder: Path, names: Sequence[str]) -> None:
    """InputError that names what is in a folder to be replaced though vexport did not write it."""
    if not names:
        return
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    raise InputError(
        str(folder),
        got=f"{', '.join(map(ascii, names[:SHOWN]))}{more}, which vexport did not write",
        need="a folder with nothing else in it",
        fix="move that elsewhere, or choose another folder",
    )


def others(folder: Path, is_own: Callable[[str], bool]) -> list[str]:
    """The entries of a checkpoint's folder that are not its own; it has no folders."""
    return [
        entry.name
        for entry in sorted(folder.iterdir())
        if not is_own(entry.name) or (entry.is_dir() and not entry.is_symlink())
    ]


def checkpoint_files(folder: Path) -> frozenset[str] | None:
    """The names of what vexport wrote into a checkpoint's folder; None where it wrote none."""
    try:
        files = read_json_object(folder / RECIPE).get(FILES)
    except InputError:
        return None
    if not isinstance(files, list):
        return None
    return frozenset(name for name in files if isinstance(name, str)) | {RECIPE}


def is_filled_folder(path: Path) -> bool:
    """Return whether a folder with something in it is there; InputError where it is a file."""
    if path.exists() and not path.is_dir():
        raise InputError(str(path), got="a file", need="a folder to write to", fix="choose another path")
    return path.is_dir() and any(path.iterdir())


def not_ours(path: Path, kind: str) -> InputError:
    """The error for a folder of something else."""
    fix = "choose another path, or remove the folder yourself if nobody needs it"
    return InputError(
        str(path), got="a folder that vexport did not make", need=f"an empty folder or {kind}", fix=fix
    )


def needs_overwrite(path: Path) -> InputError:
    """The error for a folder that only --overwrite replaces."""
    fix = "choose another path or add --overwrite"
    return InputError(str(path), got="a folder that is not empty", need="a new folder", fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderKind:
    """A kind of folder: what it is called, the file that marks it and what that says.

    `entries` are the names of what vexport writes into it, also with `*`; `checkpoints` those of them that
    are checkpoints.
    """

    name: str
    mark: str
    text: str
    entries: frozenset[str]
    checkpoints: frozenset[str] = frozenset()

    def require_own(self, folder: Path) -> None:
        """InputError where a folder with something in it does not have the mark."""
        if is_filled_folder(folder) and not (folder / self.mark).is_file():
            raise not_ours(folder, self.name)

    def require_replaceable(self, folder: Path, *, overwrite: bool) -> None:
        """InputError unless nothing is there, or with `overwrite` only what vexport wrote."""
        self.require_own(folder)
        if not is_filled_folder(folder):
            return
        names = [entry.name for entry in sorted(folder.iterdir()) if not self._is_own(entry.name)]
        refuse_others(folder, names)
        for name in sorted(self.checkpoints):
            written = checkpoint_files(folder / name) if (folder / name).is_dir() else None
            if written is not None:
                refuse_others(folder / name, others(folder / name, written.__contains__))
        if not overwrite:
            raise needs_overwrite(folder)

    def begin(self, folder: Path) -> None:
        """Make the folder and its mark; what vexport wrote there before is removed, and nothing else."""
        if folder.is_dir():
            for entry in folder.iterdir():
                if entry.name != self.mark and self._is_own(entry.name):
                    _remove(entry)
        write_text(folder / self.mark, self.text)

    def _is_own(self, name: str) -> bool:
        """Return whether vexport writes an entry of this name, or makes one under a hidden name first."""
        entries = (self.mark, *self.entries)
        return any(fnmatchcase(name, entry) or fnmatchcase(name, f".{entry}.*") for entry in entries)


@contextmanager
def written_alone(folder: Path, option: str) -> Iterator[None]:
    """Within the block no other call writes into the folder, which is made; the lock goes with a process.

    InputError where another call does; `option` is what names the folder. Where the file system has no locks
    nothing is refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fix = f"wait for it, or choose another {option}"
                raise InputError(str(folder), got="another process is writing it", need="", fix=fix) from None
        yield
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
