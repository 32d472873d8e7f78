"""Places of outputs: apart from inputs, and with `--overwrite` only where vexport alone wrote.

Folders of results have a file that marks them as vexport's, and a list of what vexport writes there.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations, product
from pathlib import Path

from vexport.errors import InputError
from vexport.files import read_json_object, write_text
from vexport.outputs import RECIPE

# The key of vexport.json with the names of what was written.
FILES = "files"
SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPath:
    """A path as it was given, and the argument, option or scenario key that gave it: `OUT`, `--accept`."""

    label: str
    path: Path

    def __str__(self) -> str:
        return f"{self.label} {self.path}"


def require_separate(outputs: Sequence[NamedPath], inputs: Sequence[NamedPath]) -> None:
    """Raise InputError where an output is an input or another output, contains one, or lies inside one.

    Call it before anything is created or removed, also with `--overwrite`. Paths are compared without links
    and `..`, and by device and inode. An input that does not exist is passed over. What the links in an input
    folder point to, as in the hub's cache, counts as that input.
    """
    existing = [named for named in inputs if os.path.lexists(named.path)]
    for output, other in (*product(outputs, existing), *combinations(outputs, 2)):
        if relation := _relation(output.path, other.path):
            raise _overlap(output, relation, other)
    for output, target in product(outputs, [link for named in existing for link in _linked_files(named)]):
        if _is_within(target.path, output.path):
            raise _overlap(output, "a folder that contains the file behind", target)


def require_new_answer(file: Path, given: Sequence[Path]) -> None:
    """Raise InputError where the answer's file is one of the given paths, or a file of a given checkpoint."""
    for path in given:
        is_file_of = (path / "config.json").is_file() and file.exists() and _is_within(file, path)
        if os.path.lexists(path) and (is_file_of or _relation(file, path) == "the same path as"):
            fix = "choose another file for --output"
            got = f"a file of the input {path}" if is_file_of else f"the same path as the input {path}"
            raise InputError(f"--output {file}", got=got, need="a separate file", fix=fix)


def _overlap(output: NamedPath, relation: str, other: NamedPath) -> InputError:
    return InputError(
        str(output),
        got=f"{relation} {other}",
        need="a separate path",
        fix=f"choose another {output.label}; nothing was changed",
    )


def _relation(output: Path, other: Path) -> str:
    """Describe how an output and another path overlap; empty where they do not."""
    inside, contains = _is_within(output, other), _is_within(other, output)
    if inside and contains:
        return "the same path as"
    if contains:
        return "a folder that contains"
    return "a path inside" if inside else ""


def _is_within(inner: Path, outer: Path) -> bool:
    """Return whether `inner` is `outer` or lies below it. A link counts where it is and where it points."""
    steps = {step for path in _real_paths(inner) for step in (path, *path.parents)}
    return any(step == path or _is_same_file(step, path) for path in _real_paths(outer) for step in steps)


def resolved(path: Path) -> Path:
    """The absolute path without links and `..`; InputError for a loop of links, or a NUL in it."""
    try:
        return path.resolve()
    except (ValueError, RuntimeError):
        fix = "check the path and its links"
        raise InputError(ascii(str(path)), got="no usable path", need="a folder or file", fix=fix) from None


def _real_paths(path: Path) -> set[Path]:
    """The path without links and `..`, and the same but for its last part, which may be a link itself."""
    itself = set() if path.name in ("", "..") else {resolved(path.parent) / path.name}
    return {resolved(path), *itself}


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False


def _linked_files(folder: NamedPath) -> Iterator[NamedPath]:
    """The links directly inside an input folder."""
    if folder.path.is_dir():
        for entry in sorted(folder.path.iterdir()):
            if entry.is_symlink():
                yield NamedPath(label=f"{folder.label}'s", path=entry)


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise InputError where writing a checkpoint to `path` would replace something that must stay.

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
    """Raise InputError with the files in a folder that vexport did not write."""
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
        """Raise InputError for a folder that is not empty and lacks the mark."""
        if is_filled_folder(folder) and not (folder / self.mark).is_file():
            raise not_ours(folder, self.name)

    def require_replaceable(self, folder: Path, *, overwrite: bool) -> None:
        """Raise InputError unless the folder is empty, or with `overwrite` has only vexport's files."""
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
    """Create the folder and lock it against other calls inside the block; the lock ends with the process.

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
