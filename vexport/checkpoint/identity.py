"""Are a checkpoint's files what they were: by their status, and where that leaves a doubt by their content.

Who writes into a file can put back its size and time, but not the time of its last change of status. Of that
alone chmod, chown and a new link are the cause too; then the content decides. It is read in advance where the
work is dear, and else only by work that is done again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import xxhash

from vexport.checkpoint.index import (
    FileStatus,
    SourceIndex,
    content_files,
    read_index,
    status_of,
    statuses_of,
    weight_files,
)
from vexport.checkpoint.truncated import changed
from vexport.errors import InputError
from vexport.files import digest_bytes
from vexport.types import OnProgress, silent

T = TypeVar("T")
# Bytes that are read at once.
RUN_BYTES = 1 << 24


class StatusChanged(InputError):
    """A file has its size and time, but its status has changed: its content may be another.

    `written` is the digest of what was written meanwhile, where it can be written again and compared.
    """

    written = ""


def sure(work: Callable[[Callable[[SourceIndex], SourceIndex]], T]) -> T:
    """What `work` returns; where it ends in doubt about a file, what it returns when it is done once more.

    It gives an index that it has read to its argument, and works with what that returns.
    """
    try:
        return work(lambda index: index)
    except StatusChanged:
        return work(with_contents)


@contextmanager
def unchanged(index: SourceIndex) -> Iterator[None]:
    """Within the block a checkpoint is read that is written from then on.

    At the end InputError unless its files are those of which the index was made: StatusChanged where that is
    in doubt, which `with_contents` of the index rules out.
    """
    yield
    doubtful: Path | None = None
    for file, before in index.statuses.items():
        after = status_of(file)
        if after == before:
            continue
        if after is None:
            raise changed(file, "no such file any more")
        if file in index.contents:
            if _digest(file, after) != index.contents[file]:
                raise changed(file, "other bytes than when the work began")
        elif after._replace(changed=before.changed) != before:
            raise changed(file, "another file, size or time than when the work began")
        else:
            doubtful = doubtful or file
    if doubtful:
        got = "another time of change than when the work began"
        raise StatusChanged(
            str(doubtful), got=got, need="a file that stays the same while it is read", fix="run again"
        )


def with_contents(index: SourceIndex, on_progress: OnProgress = silent) -> SourceIndex:
    """The index with a digest of each file, which is read for it; InputError where one has changed since."""
    contents, total = dict[Path, str](), sum(status.size for status in index.statuses.values())
    done = 0
    for file, status in index.statuses.items():
        on_progress("read the source (bytes)", done, total)
        contents[file] = _digest(file, status)
        done += status.size
    on_progress("read the source (bytes)", done, total)
    return replace(index, contents=contents)


def read_again(index: SourceIndex, on_progress: OnProgress = silent) -> SourceIndex:
    """The index of the same checkpoint as it is now, `with_contents`; InputError where it is another."""
    again = read_index(index.root)
    if again != index:
        raise changed(index.root, "another header or config than when the work began")
    return with_contents(again, on_progress)


def weights_content(folder: Path) -> str:
    """A digest of the bytes of all weights in a folder."""
    statuses = statuses_of(sorted(folder.glob("*.safetensors")))
    return digest_bytes(repr([(file.name, _digest(file, one)) for file, one in statuses.items()]).encode())


def folder_status(root: Path) -> str:
    """A digest that changes when a file of a checkpoint is written, replaced, or given other rights."""
    files = [(str(file.relative_to(root)), status_of(file)) for file in _files(root)]
    return digest_bytes(repr([(name, status and status[2:]) for name, status in files]).encode())


def folder_content(root: Path) -> str:
    """A digest of the bytes of a checkpoint's files; in one process each is read once, unless it changes."""
    statuses = statuses_of(_files(root))
    contents = [(str(file.relative_to(root)), _digest(file, one)) for file, one in statuses.items()]
    return digest_bytes(repr(contents).encode())


def _files(root: Path) -> list[Path]:
    return sorted({*weight_files(root), *content_files(root)})


@cache
def _digest(file: Path, status: FileStatus) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while data := stream.read(RUN_BYTES):
            digest.update(data)
    if status_of(file) != status:
        raise changed(file, "another status after it was read than before")
    return digest.hexdigest()
