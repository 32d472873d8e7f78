"""How far a shard is written: a record next to it, by which a later call tells whole units from others."""

import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from vexport.types import TensorInfo

SUFFIX = ".progress"
# Bytes that are read at once.
RUN_BYTES = 1 << 24


def progress_file(shard: Path) -> Path:
    """The record of a shard."""
    return shard.with_name(shard.name + SUFFIX)


class Progress:
    """A line for each finished unit of a shard: the XXH3 of its computed bytes, 16 hexadecimal digits.

    Neither the record nor the shard is synced while it grows. After a power cut either may lack what was
    written last; then the two do not agree, and what follows the last unit that does is written again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.open("a+b", buffering=0)

    def verified(
        self, shard: int, header: bytes, sources: Sequence[TensorInfo | None], ends: Sequence[int]
    ) -> int:
        """The number of units in the shard's descriptor that are as recorded; the record is cut to them.

        `sources` has the tensor of each unit that is a copy, and is compared with it; `ends` has where the
        header and each unit end.
        """
        self._file.seek(0)
        lines, done = self._file.read().split(b"\n")[:-1], 0
        if os.pread(shard, len(header), 0) == header:
            for source, line, start, stop in zip(sources, lines, ends, ends[1:], strict=False):
                same = _is_copy(shard, start, source) if source else _checksum(shard, start, stop) == line
                if not same:
                    break
                done += 1
        self._file.truncate(sum(len(line) + 1 for line in lines[:done]))
        return done

    def add(self, checksum: str) -> None:
        """One more unit is in the shard."""
        self._file.write(checksum.encode() + b"\n")

    def close(self) -> None:
        """Close the record, which stays."""
        self._file.close()


def _checksum(shard: int, start: int, stop: int) -> bytes | None:
    """Of the bytes from `start` to `stop`; None where the file ends before."""
    checksum = xxhash.xxh3_64()
    while start < stop:
        data = os.pread(shard, min(RUN_BYTES, stop - start), start)
        if not data:
            return None
        checksum.update(data)
        start += len(data)
    return checksum.hexdigest().encode()


def _is_copy(shard: int, position: int, source: TensorInfo) -> bool:
    """Whether the shard holds a tensor's bytes at `position`."""
    with source.file.open("rb", buffering=0) as file:
        for start in range(source.start, source.end, RUN_BYTES):
            data = os.pread(file.fileno(), min(RUN_BYTES, source.end - start), start)
            if os.pread(shard, len(data), position + start - source.start) != data:
                return False
    return True
