"""Create output folders that appear completely or not at all.

An output folder is prepared in a hidden working folder next to it. The working folder of `OUT` is
`.OUT.partial`, which only its owner can enter. It contains:

- a record of the inputs that OUT is made from, locked while a process writes
- `new`, which becomes OUT
- `aside`, files that a resumed call needs and that are not part of OUT
- a list of the files in `new` and `aside`, to which `record` (outputs/manifest.py) adds a name
  before the file is made
- `old`, an earlier OUT, only while it is replaced

If a call dies while it replaces OUT, the next call moves `old` back.
"""

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from vexport.errors import CheckpointFailed, InputError, VexportError
from vexport.files import read_json_object, write_text
from vexport.numerics.ranks import on_first, rank_and_size
from vexport.outputs import RECIPE
from vexport.outputs.manifest import begin_manifest, has_manifest, remove_recorded, unlisted_entries
from vexport.outputs.manifest import record as record_file
from vexport.outputs.owned import (
    ASIDE,
    FILES,
    NEW,
    OLD,
    RECORD,
    foreign_entries,
    remove_checkpoint,
    remove_unfinished,
)
from vexport.outputs.replaceable import is_filled_folder, refuse_existing, resolved
from vexport.records import Json
from vexport.rules import outputs as rules
from vexport.version import __version__

# Key of vexport.json that marks a checkpoint which a failed call has left as OUT.failed.
FAILED = "failed"


def working_folder(path: Path) -> Path:
    """Return the folder in which `path` is made until it is complete."""
    return resolved(path).parent / f".{resolved(path).name}.partial"


def failed_folder(path: Path) -> Path:
    """Return the folder that is left next to `path` if the checkpoint fails."""
    return resolved(path).with_name(f"{resolved(path).name}.failed")


def aside_folder(folder: Path) -> Path:
    """Return the folder for files that later calls need and that are not part of OUT.

    It is next to `folder`, which `resumable_directory` yields.
    """
    return folder.parent / ASIDE


def keep_as_failed(folder: Path, path: Path, failure: CheckpointFailed) -> CheckpointFailed:
    """Rename a failed checkpoint to `PATH.failed`, and return the failure with the new path.

    `folder` is the folder that `resumable_directory` yields. Only a checkpoint that an earlier
    failed call left as `PATH.failed` is replaced. If anything else has this name, even a link or a
    valid checkpoint, `folder` is not kept, and the returned error contains the reason.
    """
    failed = failed_folder(path)
    if is_replaceable_failure(failed):
        _list_files(folder, {FAILED: True})
        if failed.exists():
            remove_checkpoint(failed)
        folder.rename(failed)
        fix = f"{failure.fix}; the checkpoint is kept as {failed}"
    else:
        reason = f"{failed} exists and was not written by a failed call"
        fix = f"{failure.fix}; the checkpoint is not kept, because {reason}: move it away"
    return failure.moved(failure.where, fix=fix)


def is_replaceable_failure(failed: Path) -> bool:
    """Return True if a path is free for a failed checkpoint.

    The path is free if it does not exist or is an empty folder. It is also free if it contains only
    a checkpoint that a failed call marked with `FAILED`.
    """
    if not os.path.lexists(failed):
        return True
    if failed.is_symlink():
        return False
    try:
        refuse_existing(failed, overwrite=True)
        return not is_filled_folder(failed) or read_json_object(failed / RECIPE).get(FAILED) is True
    except InputError:
        return False


@contextmanager
def new_directory(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a folder that becomes `path` if the block ends without error, and is removed otherwise.

    Raises the InputErrors of `resumable_directory`.
    """
    with _directory(path, overwrite=overwrite) as (work, record):
        _clear_part(work, NEW)
        _clear_part(work, ASIDE)
        _begin(work, is_continued=False)
        _rewrite(record, "not to be continued")
        try:
            yield work / NEW
        except BaseException:
            if _is_own_record(record, work):
                remove_unfinished(work)
            raise


@contextmanager
def resumable_directory(
    path: Path,
    *,
    input_digest: str,
    overwrite: bool,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[Path]:
    """Yield a folder that becomes `path` if the block ends without error.

    If the block is interrupted, the folder is kept, and the next call with the same `input_digest`
    resumes from the weights in it. A call with another digest starts with an empty folder. If
    vexport itself raises an error, the folder is removed. `note` receives a message if a call
    resumes or starts again.

    Raises InputError if `path` exists and may not be replaced (see `refuse_existing`), or if it
    cannot be renamed. The same is raised if the working folder is not vexport's, or if another
    process uses it.

    With torchrun, the first rank prepares the folder. `path` appears at the end of this rank's
    block.
    """
    if rank_and_size()[0] > 0:
        yield on_first(Path)
        return
    with _directory(path, overwrite=overwrite) as (work, record):
        before = record.read()
        continued = before == input_digest
        if before:
            note(
                "resumes after the last layer or step that the interrupted call finished"
                if continued
                else "starts again: its inputs have changed"
            )
        _clear_part(work, NEW, keep="*.safetensors*" if continued else "")
        _clear_part(work, ASIDE, keep="*" if continued else "")
        _begin(work, is_continued=continued)
        _rewrite(record, input_digest)
        try:
            yield on_first(lambda: work / NEW)
        except VexportError:
            if _is_own_record(record, work):
                remove_unfinished(work)
            raise


@contextmanager
def _directory(path: Path, *, overwrite: bool) -> Iterator[tuple[Path, TextIO]]:
    """Yield the working folder and its locked record.

    If the block ends without error, `new` becomes `path`. Before that, `path` is checked again,
    because something else may have appeared there.
    """
    path = resolved(path)
    if path.is_mount():
        raise InputError.of(rules.MOUNT_POINT, str(path))
    refuse_existing(path, overwrite=overwrite)
    work = working_folder(path)
    try:
        with _locked(work, path) as record:
            _recover(path, work)
            refuse_existing(path, overwrite=overwrite)
            yield work, record
            for name in unlisted_entries(work, work / NEW):
                raise _foreign_entry_error(work / name, path)
            _list_files(work / NEW)
            _sync(work / NEW)
            refuse_existing(path, overwrite=overwrite)
            _swap(path, work)
            _sync_entry(path.parent)
            remove_checkpoint(work / OLD)
            remove_unfinished(work)
    except OSError as error:
        error.filename = error.filename or str(work)  # an error of a full disk has no file name
        raise


@contextmanager
def _locked(work: Path, path: Path) -> Iterator[TextIO]:
    """Yield the open record of a working folder, locked for as long as this process lives.

    Raises InputError if the folder belongs to someone else, if it contains files that vexport does
    not write, or if another process has locked it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        work.mkdir(mode=0o700)
    _require_ours(work, path)
    descriptor = os.open(
        work / RECORD, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace") as record:
        _lock(record, work, path)
        yield record


def _require_ours(work: Path, path: Path) -> None:
    for entry in foreign_entries(work):
        raise _foreign_entry_error(entry, path)


def _is_own_record(record: TextIO, work: Path) -> bool:
    """Return True if the open record is still the record file in the working folder.

    Another process may have removed or replaced the file.
    """
    try:
        return os.path.samestat(os.fstat(record.fileno()), (work / RECORD).stat())
    except FileNotFoundError:
        return False


def _lock(record: TextIO, work: Path, path: Path) -> None:
    """Lock the record. Raise InputError if another process has locked it or just removed it."""
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_own_record(record, work):
            return
    except BlockingIOError:
        pass
    raise InputError.of(rules.LOCKED, str(path), option="path")


def _foreign_entry_error(entry: Path, path: Path) -> InputError:
    work = working_folder(path)
    where = "" if entry == work else f" ({ascii(str(entry.relative_to(work)))})"
    return InputError.of(rules.FOREIGN_WORK, str(path), work=work, entry=where)


def _sync(folder: Path) -> None:
    """Flush all files of a folder to disk, so that they survive a power cut after the rename."""
    for entry in (*folder.rglob("*"), folder):
        _sync_entry(entry)


def _sync_entry(path: Path) -> None:
    """Sync a file or folder. Errors of file systems that cannot sync (some FUSE) are ignored."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            error.filename = str(path)
            raise
    finally:
        os.close(descriptor)


def _recover(path: Path, work: Path) -> None:
    """Finish or undo the replacement of `path` that an earlier call did not complete.

    If `path` is missing, `old` is moved back. If `path` is the new folder, `old` is removed. Raises
    InputError if another program created `path`.
    """
    if not (work / OLD).exists():
        return
    if not path.exists():
        (work / OLD).rename(path)
    elif (work / NEW).exists():
        raise InputError.of(rules.REPLACED_MEANWHILE, str(path), old=work / OLD)
    else:
        remove_checkpoint(work / OLD)


def _swap(path: Path, work: Path) -> None:
    """Rename `path` to `old` and `new` to `path`. If this is interrupted, `path` is restored."""
    try:
        if path.exists():
            path.rename(work / OLD)
        (work / NEW).rename(path)
    except BaseException:
        if (work / OLD).exists() and not path.exists():
            (work / OLD).rename(path)
        raise


def _clear_part(work: Path, part: str, keep: str = "") -> None:
    """Create a part of the working folder, or remove vexport's files in it.

    Files that match `keep` stay.
    """
    folder = work / part
    folder.mkdir(exist_ok=True)
    kept = [file for file in folder.iterdir() if keep and file.match(keep)]
    remove_recorded(work, folder, kept)


def _begin(work: Path, *, is_continued: bool) -> None:
    """Start the list of vexport's files in `new` and `aside`, or continue an earlier list."""
    if not is_continued or not has_manifest(work):
        begin_manifest(work)
    record_file(work / NEW / RECIPE)


def _rewrite(record: TextIO, text: str) -> None:
    """Replace the text of the record. It is never empty in between."""
    record.seek(0)
    record.write(text)
    record.truncate()
    record.flush()


def _list_files(folder: Path, marks: Mapping[str, Json] = MappingProxyType({})) -> None:
    """List the files of a checkpoint in its recipe, by which vexport recognizes its output.

    `marks` are additional keys of the recipe.
    """
    recipe: dict[str, Json] = {"vexport": __version__}
    with suppress(InputError):
        recipe = read_json_object(folder / RECIPE)
    files = [entry for entry in folder.rglob("*") if not entry.is_dir()]
    names: list[Json] = [
        *sorted({RECIPE, *(file.relative_to(folder).as_posix() for file in files)})
    ]
    if recipe.get(FILES) != names or marks:
        write_text(folder / RECIPE, json.dumps({**recipe, FILES: names, **marks}, indent=2) + "\n")
