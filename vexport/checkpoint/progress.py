"""How far a shard is written: a record next to it, by which a later call tells whole units from others."""

import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

SUFFIX = ".progress"
# Bytes that are read at once.
RUN_BYTES = 1 << 24


def progress_file(shard: Path) -> Path:
    """The record of a shard."""
    return shard.with_name(shard.name + SUFFIX)


class Progress:
    """A line for each finished unit of a shard: the XXH3 of the file up to its end, 16 hexadecimal digits.

    Neither the record nor the shard is synced while it grows. After a power cut either may lack what was
    written last; then the two do not agree, and what follows the last unit that does is written again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.open("a+b", buffering=0)

    def verified(self, shard: int, header: bytes, ends: Sequence[int]) -> tuple[int, xxhash.xxh3_64]:
        """The number of units in the shard's descriptor that are as recorded, and the digest to their end.

        The record is cut to them; `ends` has where the header and each unit end.
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
        """One more unit is in the shard, whose digest to its end is `digest`."""
        self._file.write(digest.encode() + b"\n")

    def close(self) -> None:
        """Close the record, which stays."""
        self._file.close()


def written_digest(shard: Path) -> str:
    """The digest of a shard that is whole, by its record."""
    return f"xxh3:{progress_file(shard).read_text(encoding='ascii').splitlines()[-1]}"


def _update(digest: xxhash.xxh3_64, shard: int, start: int, stop: int) -> bool:
    """Add the bytes from `start` to `stop` to a digest; False where the file ends before."""
    while start < stop:
        data = os.pread(shard, min(RUN_BYTES, stop - start), start)
        if not data:
            return False
        digest.update(data)
        start += len(data)
    return True
