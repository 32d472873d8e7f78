"""Files that appear whole or not at all, digests, and JSON of our own types."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from vexport.errors import InputError, VexportError
from vexport.types import Json

T = TypeVar("T")
# In an unfinished folder: the digest of what it is made from.
RECORD = ".made-from"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it takes the name `path` when the block ends without error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Json:
    """The JSON value in `path`; InputError names the line of a syntax error."""
    try:
        value: Json = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(str(path), got="no such file", need="a JSON file", fix="check the path") from None
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(str(path), got=str(error), need="readable JSON", fix="check the file") from None
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}"
        raise InputError(place, got=error.msg, need="valid JSON", fix="mend or restore the file") from None
    except (ValueError, RecursionError) as error:
        got = f"broken JSON ({error})"
        raise InputError(str(path), got=got, need="valid JSON", fix="mend or restore the file") from None
    return value


def read_json_object(path: Path) -> dict[str, Json]:
    """The JSON object in `path`; InputError where it is another kind of value."""
    value = read_json(path)
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise InputError(str(path), got=f"a JSON {kind}", need="a JSON object", fix="mend the file")
    return value


def to_json(value: object) -> str:
    """One of our frozen types as indented JSON with a final newline."""
    return TypeAdapter(type(value)).dump_json(value, indent=2).decode() + "\n"


def json_schema(kind: type[T]) -> str:
    """The JSON schema of one of our frozen types."""
    schema = TypeAdapter(kind).json_schema(mode="serialization")
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def from_json(kind: type[T], path: Path) -> T:
    """Read one of our frozen types; InputError names the first field that does not fit."""
    value = read_json(path)
    try:
        parsed: T = TypeAdapter(kind).validate_python(value)
        return parsed
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"{path}: {place}", got=first["msg"], need=f"a {kind.__name__}", fix="recreate the file"
        ) from None


def digest_bytes(data: bytes) -> str:
    """SHA-256 as hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes as hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def new_directory(path: Path, *, overwrite: bool, mark: str = "config.json") -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends without error.

    InputError where `path` exists and is not an empty folder, unless `overwrite` (see `refuse_existing`).
    """
    refuse_existing(path, overwrite=overwrite, mark=mark)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def resumable_directory(
    path: Path,
    *,
    made_from: str,
    overwrite: bool,
    keep: str = "*.safetensors",
    mark: str = "config.json",
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[Path]:
    """Yield a folder beside `path` that takes its name when the block ends without error.

    Whatever breaks the block off but a refusal of ours leaves the folder for the next call with the same
    `made_from`, a digest, to go on in: it finds the files that match `keep`. One with another digest begins
    an empty folder. `note` is told of both. InputError where `path` exists and may not be replaced (see
    `refuse_existing`), where it cannot be renamed, or where another process is writing it.
    """
    path = path.resolve()
    refuse_existing(path, overwrite=overwrite, mark=mark)
    if path.is_mount():
        fix = "choose a folder below it"
        raise InputError(str(path), got="a mount point", need="a folder that can be renamed", fix=fix)
    partial, replaced = (path.with_name(f".{path.name}.{suffix}") for suffix in ("partial", "replaced"))
    partial.mkdir(parents=True, exist_ok=True)
    with _alone(partial / RECORD, path) as record:
        before = record.read()
        continued = before == made_from
        if before:
            note("goes on where it was broken off" if continued else "begins anew: its inputs have changed")
        for entry in partial.iterdir():
            if entry.name != RECORD and not (continued and entry.match(keep)):
                entry.unlink()
        record.truncate(0)
        record.write(made_from)
        record.flush()
        try:
            yield partial
        except VexportError:
            shutil.rmtree(partial)
            raise
        (partial / RECORD).unlink()
        shutil.rmtree(replaced, ignore_errors=True)
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def _alone(record: Path, path: Path) -> Iterator[TextIO]:
    """The open record file, locked for as long as this process lives; InputError where another has it."""
    with record.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                str(path),
                got="another process that writes it",
                need="one at a time",
                fix="wait for it, or choose another path",
            ) from None
        file.seek(0)
        yield file


def refuse_existing(path: Path, *, overwrite: bool, mark: str = "config.json") -> None:
    """InputError where writing to `path` would replace something and `overwrite` is off.

    Even with `overwrite` only a folder that holds the file `mark` is replaced: one of ours.
    """
    if path.exists() and not path.is_dir():
        raise InputError(str(path), got="a file", need="a folder to write to", fix="choose another path")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if overwrite and not (path / mark).exists():
        got, need = f"a folder without {mark}", "one that may be replaced"
        raise InputError(str(path), got=got, need=need, fix="choose another path, or empty the folder")
    if not overwrite:
        raise InputError(
            str(path),
            got="a folder that is not empty",
            need="a new folder",
            fix="choose another path or add --overwrite",
        )
