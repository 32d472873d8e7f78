"""Write files completely or not at all, compute digests, and read and write JSON."""

import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from vexport.errors import InputError, VexportError, require_working_disk
from vexport.errors.extras import disk_full, is_disk
from vexport.errors.validation import validation_problems
from vexport.records import Json
from vexport.rules import file as rules

T = TypeVar("T")
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
LFS_VERSION = b"version https://git-lfs.github.com/spec/"
LFS_POINTER_BYTES = 1024


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Add `place` to an OSError inside the block. The system names no file if a write fails."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or place
        raise


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`.

    It is renamed to `path` if the block ends without error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        yield temporary
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None:  # an error of a write has no file name
            error.filename = error.filename or str(path)
        raise
    except Exception as error:
        # Other libraries raise other types for an error of the system.
        if is_disk(str(error)) and not isinstance(error, VexportError):
            raise disk_full(str(path), error) from error
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, completely or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def require_fetched(files: Iterable[Path]) -> None:
    """Raise InputError if a file is a Git LFS pointer instead of its content."""
    pointers = [file for file in files if _is_lfs_pointer(file)]
    if pointers:
        others = f" (and {len(pointers) - 1:,} more files)" if len(pointers) > 1 else ""
        raise InputError.of(rules.LFS_POINTER, f"{pointers[0]}{others}")


def _is_lfs_pointer(file: Path) -> bool:
    """Return True for a Git LFS pointer: a small text that starts with the version.

    Source: github.com/git-lfs/git-lfs/blob/main/docs/spec.md.
    """
    try:
        if not file.is_file() or file.stat().st_size > LFS_POINTER_BYTES:
            return False
        with file.open("rb") as stream:
            return stream.read(len(LFS_VERSION)) == LFS_VERSION
    except OSError:
        return False


def unreadable_kind(path: Path) -> str | None:
    """Describe a path that is not a readable file, such as `a folder` or `a named pipe (FIFO)`.

    Return None for a readable file, or if the path does not exist.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a link to nothing" if path.is_symlink() else None
    except OSError as error:
        return "a link that points to itself" if error.errno == errno.ELOOP else str(error.strerror)
    if stat.S_ISREG(mode):
        return None if os.access(path, os.R_OK) else "a file without read permission"
    return next((words for is_kind, words in _KINDS if is_kind(mode)), "not a regular file")


def require_no_device(path: Path) -> None:
    """Raise InputError for a pipe or a device, which may never end. A missing file is accepted."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError.of(rules.DEVICE, str(path))


def read_json(path: Path) -> Json:
    """Return the JSON value in `path`.

    Raises:
        InputError: If it cannot be read. For a syntax error, the error names the line.
    """
    require_fetched([path])
    require_no_device(path)
    try:
        value: Json = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError.of(rules.MISSING, str(path)) from None
    except (UnicodeDecodeError, OSError) as error:
        require_working_disk(error, path)
        raise InputError.of(rules.UNREADABLE, str(path), reason=error) from None
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}"
        raise InputError.of(rules.JSON, place, reason=error.msg, need="") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise InputError.of(rules.JSON, str(path), reason=reason, need="") from None
    return value


def read_json_object(path: Path) -> dict[str, Json]:
    """Return the JSON object in `path`. Raise InputError for another kind of value."""
    value = read_json(path)
    if not isinstance(value, dict):
        kind = f"a JSON {type(value).__name__}"
        raise InputError.of(rules.JSON_OBJECT, str(path), kind=kind, need="")
    return value


def to_json(value: object) -> str:
    """Return a dataclass, or any value with a type known to pydantic, as indented JSON."""
    return TypeAdapter(type(value)).dump_json(value, indent=2, by_alias=True).decode() + "\n"


def from_json(kind: type[T], path: Path) -> T:
    """Read a value of the type `kind`, such as a dataclass, from a JSON file.

    Raises:
        InputError: If the file does not fit. The error names the first wrong field.
    """
    value = read_json(path)
    try:
        parsed: T = TypeAdapter(kind).validate_python(value)
        return parsed
    except ValidationError as error:
        problem = validation_problems(error)[0]
        where = f"{path}: {problem.place}" if problem.place else str(path)
        raise problem.at(where, fix="restore the file, or create it again") from None


def digest_bytes(data: bytes) -> str:
    """Return the SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
