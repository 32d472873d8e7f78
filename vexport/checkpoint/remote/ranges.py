"""The weights of a checkpoint in object storage: ranges in memory and on disk, as many as are needed at once.

A tensor is fetched as a whole into a file without a name, which goes with the last view of it; small ones by
blocks that hold their neighbours too. What is no longer in use is kept as long as there is room for it.
"""

import mmap
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from vexport.checkpoint.remote.mirror import Remote
from vexport.checkpoint.remote.storage import Storage
from vexport.types import TensorInfo

# Bytes of one request, and requests at once.
REQUEST_BYTES, WORKERS = 16 << 20, 8
# Tensors up to this size come by blocks of it, of which so many are kept.
BLOCK_BYTES, BLOCKS = 256 << 10, 256
# Bytes on disk that are kept beyond those in use.
KEPT_BYTES = 2 << 30


class RemoteWeights:
    """Fetches the tensors of one mirror; threads may share it."""

    def __init__(self, root: Path, remote: Remote) -> None:
        self._root, self._remote = root, remote
        self._storage = Storage(remote.url)
        self._pool = ThreadPoolExecutor(WORKERS)
        self._tensors = ThreadPoolExecutor(2)
        self._lock = Lock()
        self._blocks: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._large: OrderedDict[tuple[str, int], Future[mmap.mmap]] = OrderedDict()

    def bytes_of(self, tensor: TensorInfo) -> memoryview:
        """The bytes of a tensor that is not empty. Raises as `Storage.read`."""
        if tensor.num_bytes > BLOCK_BYTES:
            return memoryview(self._mapped(tensor).result())
        first = tensor.start // BLOCK_BYTES
        blocks = [self._block(tensor, number) for number in range(first, -(-tensor.end // BLOCK_BYTES))]
        data = b"".join(block.result() for block in blocks)
        start = tensor.start - first * BLOCK_BYTES
        return memoryview(data)[start : start + tensor.num_bytes]

    def expect(self, tensors: Iterable[TensorInfo]) -> None:
        """Begin to fetch tensors that will be asked for soon."""
        for tensor in tensors:
            if tensor.num_bytes > BLOCK_BYTES:
                self._mapped(tensor)
            else:
                first, last = tensor.start // BLOCK_BYTES, -(-tensor.end // BLOCK_BYTES)
                for number in range(first, min(last, first + BLOCKS // 4)):
                    self._block(tensor, number)

    def release(self, tensor: TensorInfo) -> None:
        """A tensor is not needed for now: its pages leave the memory and stay on the disk."""
        found = self._large.get((self._name(tensor), tensor.start))
        if found is not None and _is_there(found):
            found.result().madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Forget everything, and what is not fetched yet."""
        self._large.clear()
        self._blocks.clear()
        for pool in (self._tensors, self._pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _name(self, tensor: TensorInfo) -> str:
        return tensor.file.relative_to(self._root).as_posix()

    def _block(self, tensor: TensorInfo, number: int) -> "Future[bytes]":
        name = self._name(tensor)
        with self._lock:
            found = self._blocks.pop((name, number), None)
            if found is None or (found.done() and found.exception() is not None):
                start = number * BLOCK_BYTES
                stop = min(start + BLOCK_BYTES, self._remote.files[name].size)
                found = self._pool.submit(self._read, name, start, stop)
            self._blocks[name, number] = found
            while len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)
            return found

    def _mapped(self, tensor: TensorInfo) -> "Future[mmap.mmap]":
        key = self._name(tensor), tensor.start
        with self._lock:
            found = self._large.pop(key, None)
            if found is None or (found.done() and found.exception() is not None):
                found = self._tensors.submit(self._fetch, key[0], tensor.start, tensor.end)
            self._large[key] = found
            finished = {one: len(future.result()) for one, future in self._large.items() if _is_there(future)}
            while len(finished) > 1 and sum(finished.values()) > KEPT_BYTES:
                oldest = next(iter(finished))
                del finished[oldest], self._large[oldest]
            return found

    def _fetch(self, name: str, start: int, end: int) -> mmap.mmap:
        """A range in a file that has no name."""
        with tempfile.TemporaryFile(dir=self._root) as file:
            file.truncate(end - start)

            def fill(position: int) -> None:
                data = self._read(name, position, min(position + REQUEST_BYTES, end))
                os.pwrite(file.fileno(), data, position - start)

            for _ in self._pool.map(fill, range(start, end, REQUEST_BYTES)):
                pass
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _read(self, name: str, start: int, stop: int) -> bytes:
        return self._storage.read(name, start, stop, self._remote.files[name])


def _is_there(future: "Future[mmap.mmap]") -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
