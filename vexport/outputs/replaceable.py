"""Check where outputs are written: apart from inputs, and only over vexport's files.

Folders of results contain a file that marks them as vexport's, and a list of vexport's files.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

from vexport.errors import InputError
from vexport.files import write_text
from vexport.outputs.manifest import (
    begin_manifest,
    has_manifest,
    recorded,
    remove_recorded,
    require_manifest,
    unlisted_entries,
)
from vexport.outputs.owned import (
    OLD,
    checkpoint_files,
    foreign_entries,
    is_folder,
    remove_checkpoint,
    remove_unfinished,
    unowned_entries,
)
from vexport.rules import outputs as rules

MAX_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPath:
    """A path with the argument, option or scenario key that it comes from: `OUT`, `--accept`."""

    label: str
    path: Path

    def __str__(self) -> str:
        return f"{self.label} {self.path}"


def require_separate(outputs: Sequence[NamedPath], inputs: Sequence[NamedPath]) -> None:
    """Raise InputError if an output overlaps with an input or with another output.

    Paths overlap if they are equal or if one is inside of the other. Call this before anything is
    created or removed, even with `--overwrite`. Paths are compared without links and `..`, and by
    device and inode. Inputs that do not exist are ignored. Targets of links in an input folder, as
    in the hub's cache, count as part of that input.
    """
    existing = [named for named in inputs if os.path.lexists(named.path)]
    for output, other in (*product(outputs, existing), *combinations(outputs, 2)):
        if relation := _relation(output.path, other.path):
            raise _overlap(output, relation, other)
    for output, target in product(
        outputs, [link for named in existing for link in _linked_files(named)]
    ):
        if _is_within(target.path, output.path):
            relation = _relation(output.path, target.path) or "a folder that contains"
            raise _overlap(output, f"{relation} the target of", target)


def _overlap(output: NamedPath, relation: str, other: NamedPath) -> InputError:
    return InputError.of(
        rules.OVERLAP, str(output), relation=relation, other=other, label=output.label
    )


def _relation(output: Path, other: Path) -> str:
    inside, contains = _is_within(output, other), _is_within(other, output)
    if inside and contains:
        return "the same path as"
    if contains:
        return "a folder that contains"
    return "a path inside" if inside else ""


def _is_within(inner: Path, outer: Path) -> bool:
    """Return True if `inner` is `outer` or is inside of it.

    A link is compared by its location and by its target.
    """
    steps = {step for path in _real_paths(inner) for step in (path, *path.parents)}
    if any(
        step == path or _is_same_file(step, path) for path in _real_paths(outer) for step in steps
    ):
        return True
    return _has_hard_links(inner) and any(_is_same_file(inner, file) for file in outer.rglob("*"))


def _has_hard_links(file: Path) -> bool:
    """Return True if a file has several hard links. Another link to it may be in the other path."""
    try:
        return file.is_file() and file.stat().st_nlink > 1
    except OSError:
        return False


def resolved(path: Path) -> Path:
    """Return the absolute path without links and `..`.

    Raises:
        InputError: If links form a loop, or if the path contains a NUL.
    """
    try:
        return path.resolve()
    except (ValueError, RuntimeError):
        raise InputError.of(rules.PATH, ascii(str(path))) from None


def _real_paths(path: Path) -> set[Path]:
    """Return the path without links and `..`, and the same path with its last part unresolved."""
    itself = set() if path.name in ("", "..") else {resolved(path.parent) / path.name}
    return {resolved(path), *itself}


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False


def _linked_files(folder: NamedPath) -> Iterator[NamedPath]:
    if folder.path.is_dir():
        for entry in sorted(folder.path.iterdir()):
            if entry.is_symlink():
                yield NamedPath(label=f"a link in {folder.label},", path=entry)


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise InputError unless a checkpoint may be written to `path`.

    The path may be missing or an empty folder. With `overwrite`, it may also be a checkpoint that
    vexport wrote, if the folder contains no other files.
    """
    if not is_filled_folder(path):
        return
    owned = checkpoint_files(path)
    if owned is None:
        kind = "a checkpoint that vexport wrote"
        raise InputError.of(rules.FOREIGN_FOLDER, str(path), kind=kind, path=path)
    require_no_others(path, unowned_entries(path, owned))
    if not overwrite:
        raise InputError.of(rules.NOT_EMPTY, str(path))


def require_no_others(folder: Path, names: Sequence[str]) -> None:
    """Raise InputError for files in a folder that vexport did not write. The error names them."""
    if not names:
        return
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    listed = f"{', '.join(map(ascii, names[:MAX_NAMES]))}{more}"
    raise InputError.of(rules.FOREIGN_FILES, str(folder), names=listed)


def is_filled_folder(path: Path) -> bool:
    """Return True if the folder exists and is not empty. Raise InputError if it is a file."""
    if path.exists() and not path.is_dir():
        raise InputError.of(rules.FILE, str(path))
    return path.is_dir() and any(path.iterdir())


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderKind:
    """Kind of folder that vexport writes: its name, the file that marks it, and that file's text.

    The folder's manifest lists vexport's files in it. `checkpoint` is the name of a checkpoint in
    the folder. The checkpoint's files are not in the manifest, but in its recipe.
    """

    name: str
    mark: str
    text: str
    checkpoint: str | None = None

    def require_own(self, folder: Path) -> None:
        """Raise InputError if the folder is not empty and has no mark.

        A folder without the mark is accepted if it has a manifest and only vexport's files. A
        killed call may have left such a folder.
        """
        if not is_filled_folder(folder) or (folder / self.mark).is_file():
            return
        if not has_manifest(folder) or unlisted_entries(folder, folder):
            raise InputError.of(rules.FOREIGN_FOLDER, str(folder), kind=self.name, path=folder)

    def require_replaceable(self, folder: Path, *, overwrite: bool) -> None:
        """Raise InputError unless the folder is empty or may be replaced.

        It may be replaced if `overwrite` is set and if it contains only vexport's files.
        """
        self.require_own(folder)
        if not is_filled_folder(folder):
            return
        require_manifest(folder)
        if not overwrite:
            raise InputError.of(rules.NOT_EMPTY, str(folder))
        require_no_others(folder, unlisted_entries(folder, folder, self._separate_parts(folder)))
        unfinished = self._unfinished(folder)
        if unfinished in self._separate_parts(folder):
            foreign = foreign_entries(unfinished)
            require_no_others(folder, [entry.relative_to(folder).as_posix() for entry in foreign])
        if self.checkpoint is not None and is_folder(folder / self.checkpoint):
            refuse_existing(folder / self.checkpoint, overwrite=True)

    def begin(self, folder: Path) -> None:
        """Make the folder, its mark and its manifest. Only vexport's earlier files are removed.

        The manifest is emptied last, so that a call that is killed earlier leaves no unlisted file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if has_manifest(folder):
            for part in self._separate_parts(folder):
                if part == self._unfinished(folder):
                    remove_checkpoint(part / OLD)
                    remove_unfinished(part)
                elif part.is_dir():  # the mark stays
                    remove_checkpoint(part)
            remove_recorded(folder, folder, [folder / self.mark])
        begin_manifest(folder)
        write_text(folder / self.mark, self.text)

    def _separate_parts(self, folder: Path) -> list[Path]:
        """Return the mark, the checkpoint's folder, and the folder in which it is prepared.

        The manifest does not list the files in them.
        """
        mark = folder / self.mark
        parts = [] if mark.is_symlink() else [mark]
        if self.checkpoint is not None and self.checkpoint in recorded(folder):
            both = (folder / self.checkpoint, self._unfinished(folder))
            parts += [path for path in both if is_folder(path)]
        return parts

    def _unfinished(self, folder: Path) -> Path:
        return folder / f".{self.checkpoint}.partial"


@contextmanager
def locked_folder(folder: Path, option: str) -> Iterator[None]:
    """Create the folder and lock it against other calls inside the block.

    The lock ends with the process. Raises InputError if another call holds the lock; `option` is
    the option that sets the folder. If the file system has no locks, the folder is not locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError.of(rules.LOCKED, str(folder), option=option) from None
        yield
    finally:
        os.close(descriptor)
