"""Write safetensors shards from front to back, while the next bytes are computed.

An interrupted shard can be resumed.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from vexport.checkpoint.dtypes import num_bytes
from vexport.checkpoint.index import INDEX_NAME, SINGLE_NAME, changed_file_error
from vexport.errors import require_working_disk
from vexport.files import write_text
from vexport.records import Json, TensorInfo, TensorSpec

# transformers' default for the size of a shard (modeling_utils.save_pretrained).
DEFAULT_SHARD_BYTES = 5_000_000_000
METADATA = {"format": "pt"}
# Suffix of a shard's progress record, which allows a later call to resume.
PROGRESS = ".progress"
# Number of bytes after which write-back starts, so that the final sync is short.
WRITE_BACK_BYTES = 1 << 26
# Bytes of a copied tensor that are in memory at a time.
COPY_BYTES = 1 << 22
# Bytes of an unfinished shard that are read at a time.
READ_BYTES = 1 << 24

Array = npt.NDArray[np.generic]
# Next bytes of a shard: an array that is computed on demand, or a stored tensor to copy.
Chunk = Callable[[], Array] | TensorInfo
Source = TypeVar("Source", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteUnit(Generic[Source]):
    """Tensors that are written together, and the caller's object from which they are computed."""

    source: Source
    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(spec.dtype, spec.shape) for spec in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(Generic[Source]):
    """A safetensors file to write: its name, and its units in order."""

    name: str
    units: tuple[WriteUnit[Source], ...]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for unit in self.units for spec in unit.tensors)

    @property
    def num_bytes(self) -> int:
        return sum(unit.num_bytes for unit in self.units)


def split_shards(
    units: Iterable[WriteUnit[Source]], *, shard_bytes: int
) -> tuple[Shard[Source], ...]:
    """Distribute units over shards in order. Units are never split, and shards are never empty."""
    contents: list[list[WriteUnit[Source]]] = [[]]
    filled = 0
    for unit in units:
        size = unit.num_bytes
        if contents[-1] and filled + size > shard_bytes:
            contents.append([])
            filled = 0
        contents[-1].append(unit)
        filled += size
    count = len(contents)
    names = (
        [SINGLE_NAME]
        if count == 1
        else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    )
    return tuple(
        Shard(name=name, units=tuple(parts)) for name, parts in zip(names, contents, strict=True)
    )


def write_index(folder: Path, shards: Sequence[Shard[object]]) -> None:
    """Write the index of a checkpoint with several shards. Write nothing for a single shard."""
    if len(shards) == 1:
        return
    weight_map: dict[str, Json] = {
        spec.name: shard.name for shard in shards for spec in shard.tensors
    }
    total = sum(shard.num_bytes for shard in shards)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(folder / INDEX_NAME, json.dumps(content, indent=2) + "\n")


def progress_file(shard: Path) -> Path:
    """Return the path of a shard's progress record."""
    return shard.with_name(shard.name + PROGRESS)


class Progress:
    """Progress record of a shard, with a line for each finished unit.

    A line is the XXH3 (16 hexadecimal digits) of the file up to the end of the unit. Neither the
    record nor the shard is synced while it grows. After a power cut the last writes to either may
    be missing, so that the two do not agree. The shard is then written again from the last unit
    that agrees.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.open("a+b", buffering=0)

    def verified(
        self, shard: int, header: bytes, ends: Sequence[int]
    ) -> tuple[int, xxhash.xxh3_64]:
        """Return the number of units that agree with the record, and the digest of these units.

        `shard` is a file descriptor. The record is truncated to these units. `ends` holds the end
        of the header and of each unit.
        """
        self._file.seek(0)
        lines, done, digest = self._file.read().split(b"\n")[:-1], 0, xxhash.xxh3_64(header)
        if os.pread(shard, len(header), 0) == header:
            for line, start, stop in zip(lines, ends, ends[1:], strict=False):
                further = digest.copy()
                if not _update(further, shard, start, stop) or further.hexdigest().encode() != line:
                    break
                done, digest = done + 1, further
        self._file.truncate(sum(len(line) + 1 for line in lines[:done]))
        return done, digest

    def add(self, digest: str) -> None:
        """Record one more unit of the shard.

        `digest` is the digest of the shard up to the unit's end.
        """
        self._file.write(digest.encode() + b"\n")

    def close(self) -> None:
        """Close the record. The file stays."""
        self._file.close()


def written_digest(shard: Path) -> str:
    """Return the digest of a complete shard from its record."""
    return f"xxh3:{progress_file(shard).read_text(encoding='ascii').splitlines()[-1]}"


def _update(digest: xxhash.xxh3_64, shard: int, start: int, stop: int) -> bool:
    """Add the bytes from `start` to `stop` to a digest.

    Return False if the file ends before `stop`.
    """
    while start < stop:
        data = os.pread(shard, min(READ_BYTES, stop - start), start)
        if not data:
            return False
        digest.update(data)
        start += len(data)
    return True


class ShardWriter:
    """Appends the chunks of a shard in a separate thread, while the caller computes more chunks.

    `done` is the number of units that an interrupted writer has left in the file and that agree
    with its record (see `Progress`). They are not written again. At the end, the record contains
    the digest of the whole shard. An error in the thread, or in a chunk, is raised by a later
    `write` or at the end.
    """

    def __init__(self, folder: Path, shard: Shard[object], *, ahead: int) -> None:
        header = header_bytes(shard.tensors)
        self._ends = list(accumulate((unit.num_bytes for unit in shard.units), initial=len(header)))
        path = folder / shard.name
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._progress = Progress(progress_file(path))
        self.done, self._digest = self._progress.verified(self._file.fileno(), header, self._ends)
        self._next = self.done
        if self.done == 0:
            self._file.truncate(0)
            self._file.write(header)
        if self._file.seek(0, os.SEEK_END) > self._ends[self.done]:
            self._file.truncate(self._ends[self.done])
        self._write_back_end = self._file.seek(self._ends[self.done])
        self._ahead, self._is_broken = ahead, False
        self._thread, self._appending = ThreadPoolExecutor(1), deque[Future[None]]()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._thread.shutdown()
        length = self._file.tell()
        self._file.close()
        self._progress.close()
        if kind is None:
            for appended in self._appending:
                appended.result()
            assert length == self._ends[-1], f"{length} bytes, not {self._ends[-1]}"

    def write(self, chunk: Chunk) -> None:
        """Pass the next chunk to the thread. Wait while more than `ahead` chunks are unfinished."""
        if len(self._appending) > self._ahead:
            self._appending.popleft().result()
        self._appending.append(self._thread.submit(self._append, chunk))

    def _append(self, chunk: Chunk) -> None:
        """Append a chunk, unless an earlier chunk failed."""
        if self._is_broken:
            return
        self._is_broken = True
        for data in stored_parts(chunk) if isinstance(chunk, TensorInfo) else (as_bytes(chunk()),):
            self._digest.update(data)
            self._write(data)
        position = self._file.tell()
        if (size := position - self._write_back_end) >= WRITE_BACK_BYTES:
            # Linux starts the write-back of these bytes without waiting for it (mm/fadvise.c).
            os.posix_fadvise(
                self._file.fileno(), self._write_back_end, size, os.POSIX_FADV_DONTNEED
            )
            self._write_back_end = position
        while self._next < len(self._ends) - 1 and position >= self._ends[self._next + 1]:
            self._progress.add(self._digest.hexdigest())
            self._next += 1
        self._is_broken = False

    def _write(self, data: memoryview) -> None:
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            error.filename = error.filename or self._file.name  # a write error has no file name
            raise


def as_bytes(array: Array) -> memoryview:
    """Return the bytes of an array in the order of its elements."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def stored_parts(tensor: TensorInfo) -> Iterator[memoryview]:
    """Yield the bytes of a stored tensor in parts. All parts use the same buffer."""
    buffer = memoryview(bytearray(min(COPY_BYTES, tensor.num_bytes)))
    with tensor.file.open("rb", buffering=0) as source:
        source.seek(tensor.start)
        position = tensor.start
        while position < tensor.end:
            try:
                count = source.readinto(buffer[: tensor.end - position])
            except OSError as error:
                require_working_disk(error, tensor.file)
                raise
            if not count:
                raise changed_file_error(
                    tensor.file, f"a file that ends at byte {position:,}, in {tensor.name}"
                )
            yield buffer[:count]
            position += count


def header_bytes(tensors: Sequence[TensorSpec]) -> bytes:
    """Return the length prefix and JSON header of a safetensors file.

    The header is padded to 8 bytes, as safetensors does.
    """
    header: dict[str, object] = {"__metadata__": METADATA}
    position = 0
    for spec in tensors:
        end = position + num_bytes(spec.dtype, spec.shape)
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
