"""Reads tensors lazily from memory-mapped safetensors files."""

import mmap
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.dtypes import to_numpy
from vexport.types import TensorInfo


class Reader:
    """Memory-mapped access to the files of a checkpoint; only the pages that are read take memory."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def raw(self, tensor: TensorInfo) -> memoryview:
        """The bytes of a tensor, without a copy; valid while the reader is open."""
        if tensor.start == tensor.end:
            return memoryview(b"")
        return memoryview(self._map(tensor.file))[tensor.start : tensor.end]

    def array(self, tensor: TensorInfo) -> npt.NDArray[np.generic]:
        """The values of a tensor in its shape; BF16 and 8-bit floats as float32."""
        return to_numpy(self.raw(tensor), tensor.dtype).reshape(tensor.shape)

    def release(self, tensors: Iterable[TensorInfo]) -> None:
        """Tell the kernel that these tensors' pages are no longer needed."""
        for tensor in tensors:
            first = -(-tensor.start // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (tensor.end - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if tensor.file in self._maps and length > 0:
                self._maps[tensor.file].madvise(mmap.MADV_DONTNEED, first, length)

    def close(self) -> None:
        """Unmap all files; views that are still alive keep theirs until they go."""
        for mapped in self._maps.values():
            try:
                mapped.close()
            except BufferError:
                continue
        self._maps.clear()

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]
