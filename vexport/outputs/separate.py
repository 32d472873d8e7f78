"""Outputs apart from inputs: a command never writes over, around or into what it reads."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

from vexport.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPath:
    """A path as it was given, and the argument, option or scenario key that gave it: `OUT`, `--accept`."""

    label: str
    path: Path

    def __str__(self) -> str:
        return f"{self.label} {self.path}"


def require_separate(outputs: Sequence[NamedPath], inputs: Sequence[NamedPath]) -> None:
    """InputError where an output is an input or another output, contains one, or lies inside one.

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
    """InputError where the file of an answer is one of the paths given, or a file of a checkpoint given."""
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
    """Return how an output and another path overlap, in words; empty where they do not."""
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
