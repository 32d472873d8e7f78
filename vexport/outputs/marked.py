"""Folders of results: a file in them marks them as vexport's, and a list names what vexport writes there."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from vexport.errors import InputError
from vexport.files import write_text
from vexport.outputs.replaceable import (
    checkpoint_files,
    is_filled_folder,
    needs_overwrite,
    not_ours,
    others,
    refuse_others,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderKind:
    """A kind of folder: what it is called, the file that marks it and what that says.

    `entries` are the names of what vexport writes into it, also with `*`; `checkpoints` those of them that
    are checkpoints; `earlier_mark` is a file that older versions left in each.
    """

    name: str
    mark: str
    text: str
    entries: frozenset[str]
    checkpoints: frozenset[str] = frozenset()
    earlier_mark: str | None = None

    def require_own(self, folder: Path) -> None:
        """InputError where a folder with something in it does not have the mark."""
        marks = (self.mark, *([self.earlier_mark] if self.earlier_mark else []))
        if is_filled_folder(folder) and not any((folder / mark).is_file() for mark in marks):
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
        """Whether vexport writes an entry of this name, or makes one under a hidden name first."""
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
                got = "another process that writes it"
                raise InputError(str(folder), got=got, need="one at a time", fix=fix) from None
        yield
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
