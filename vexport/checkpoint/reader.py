"""Read tensors lazily from memory-mapped safetensors files."""

import errno
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from vexport.bus_errors import watch_for_cuts
from vexport.checkpoint.dtypes import num_bytes, to_numpy
from vexport.checkpoint.index import changed_file_error
from vexport.records import TensorInfo, WeightPart

# numpy dtypes for views of a weight's elements: 16-bit floats as their bits.
WEIGHT_VIEWS = {"BF16": "<u2", "F16": "<u2", "F32": "<f4", "F64": "<f8"}
# Number of bytes that the kernel is told to read at a time. It ignores the rest of a longer range.
# On Linux 6.18, it read 8 MiB of a range of 64 MiB.
AHEAD_BYTES = 1 << 20
# Number of bytes compared at a time.
RUN_BYTES = 1 << 26
Array = npt.NDArray[np.generic]


class Reader:
    """Memory-mapped access to the files of a checkpoint. Only pages that are read use memory.

    Threads may share a reader.
    """

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._opening = Lock()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def raw(self, tensor: TensorInfo) -> memoryview:
        """Return the bytes of a tensor without a copy; they are valid while the reader is open.

        Raises InputError if the file has become shorter since its header was read.
        """
        if tensor.start == tensor.end:
            return memoryview(b"")
        mapped = self._map(tensor.file)
        if tensor.end > len(mapped):
            raise changed_file_error(
                tensor.file,
                f"{len(mapped):,} bytes, but a header that describes at least {tensor.end:,}",
            )
        return memoryview(mapped)[tensor.start : tensor.end]

    def is_in_place(self, tensor: TensorInfo) -> bool:
        """Return True if the tensor's file contains its bytes at the offsets of `tensor`.

        Methods of this class then read the bytes directly from the file. A subclass whose `raw`
        returns other bytes than the file must override this method.
        """
        return True

    def some_rows(self, tensor: TensorInfo, step: int) -> npt.NDArray[np.uint8]:
        """Return every `step`-th row of a two-dimensional tensor, as bytes."""
        return self.rows(tensor, range(0, tensor.shape[0], step))

    def rows(self, tensor: TensorInfo, numbers: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return some rows of a two-dimensional tensor, as bytes. No other rows are read.

        Raises InputError if the file has become shorter since its header was read.
        """
        if len(numbers) == tensor.shape[0] or not self.is_in_place(tensor):
            stored = np.frombuffer(self.raw(tensor), np.uint8)
            return stored.reshape(tensor.shape[0], -1)[numbers]
        size = tensor.num_bytes // tensor.shape[0]
        stored = np.empty((len(numbers), size), np.uint8)
        with tensor.file.open("rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for number, row in zip(numbers, stored, strict=True):
                if os.preadv(stream.fileno(), [row.data], tensor.start + number * size) < size:
                    raise changed_file_error(tensor.file, "fewer bytes than its header describes")
        return stored

    def is_hole(self, tensor: TensorInfo) -> bool:
        """Return True if all bytes of a tensor are in a hole of its sparse file.

        The bytes are then zero and need not be read.
        """
        if not self.is_in_place(tensor):
            return False
        with tensor.file.open("rb", buffering=0) as stream:
            if os.fstat(stream.fileno()).st_size < tensor.end:
                return False
            try:
                return os.lseek(stream.fileno(), tensor.start, os.SEEK_DATA) >= tensor.end
            except OSError as problem:
                return problem.errno == errno.ENXIO

    def prefetch_some_rows(self, tensor: TensorInfo, step: int) -> None:
        """Tell the kernel that `some_rows` will follow, so that it starts to read these rows."""
        if not tensor.num_bytes or not self.is_in_place(tensor):
            return
        size = tensor.num_bytes // tensor.shape[0]
        with tensor.file.open("rb", buffering=0) as stream:
            for start in range(tensor.start, tensor.end, step * size):
                os.posix_fadvise(stream.fileno(), start, size, os.POSIX_FADV_WILLNEED)

    def array(self, tensor: TensorInfo) -> npt.NDArray[np.generic]:
        """Return the values of a tensor in its shape. BF16 and 8-bit floats become float32."""
        return to_numpy(self.raw(tensor), tensor.dtype).reshape(tensor.shape)

    def floats(self, tensor: TensorInfo) -> npt.NDArray[np.float64]:
        """Return the values of a tensor in its shape, as float64."""
        return np.asarray(self.array(tensor), dtype=np.float64)

    def weight(self, tensor: TensorInfo, part: WeightPart | None) -> npt.NDArray[np.generic]:
        """Return a layer's weight (out, in) as a view of the file.

        16-bit floats are returned as their bits. `part` selects a part of the stored tensor; None
        selects all of it.
        """
        stored: npt.NDArray[np.generic] = np.frombuffer(
            self.raw(tensor), WEIGHT_VIEWS[tensor.dtype]
        ).reshape(tensor.shape)
        if part is None:
            return stored
        expert: npt.NDArray[np.generic] = stored.reshape(-1, *stored.shape[-2:])[part.expert]
        return (expert.T if part.transposed else expert)[part.start : part.stop]

    def release(self, tensors: Iterable[TensorInfo]) -> None:
        """Tell the kernel that the pages of these tensors are no longer needed."""
        for tensor in tensors:
            self._advise(tensor.file, tensor.start, tensor.end, mmap.MADV_DONTNEED)

    def prefetch(self, tensors: Iterable[TensorInfo]) -> None:
        """Tell the kernel that these tensors will be read soon, so that it starts to read them.

        They use no memory of this process: the kernel reads them into its page cache.
        """
        for tensor in tensors:
            if tensor.num_bytes and tensor.end <= len(self._map(tensor.file)):
                self._advise(tensor.file, tensor.start, tensor.end, mmap.MADV_WILLNEED)

    def release_view(self, tensor: TensorInfo, view: npt.NDArray[np.generic]) -> None:
        """Release the pages of a view of a tensor's `weight`. They may be read again later."""
        if tensor.file in self._maps:
            self._advise(tensor.file, *self._bounds(tensor, view), mmap.MADV_DONTNEED)

    def prefetch_view(self, tensor: TensorInfo, view: npt.NDArray[np.generic]) -> None:
        """Tell the kernel that a view will be read soon, so that it starts to read it."""
        if tensor.file in self._maps:
            self._advise(tensor.file, *self._bounds(tensor, view), mmap.MADV_WILLNEED)

    def close(self) -> None:
        """Unmap all files. Views that are still in use keep their files mapped."""
        for mapped in self._maps.values():
            try:
                mapped.close()
            except BufferError:
                continue
        self._maps.clear()

    def _map(self, file: Path) -> mmap.mmap:
        with self._opening:
            if file not in self._maps:
                watch_for_cuts(file)
                with file.open("rb") as stream:
                    self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            return self._maps[file]

    def _bounds(self, tensor: TensorInfo, view: npt.NDArray[np.generic]) -> tuple[int, int]:
        if not view.size:
            return 0, 0
        low, high = np.lib.array_utils.byte_bounds(view)
        first, _ = np.lib.array_utils.byte_bounds(np.frombuffer(self._map(tensor.file), np.uint8))
        return low - first, high - first

    def _advise(self, file: Path, start: int, end: int, advice: int) -> None:
        """Advise the kernel on all pages that contain a byte between `start` and `end`.

        The first and last page may also contain bytes of a neighbouring tensor. If they are
        dropped, the kernel reads them from the file again when this tensor is used.
        """
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if file not in self._maps or end <= first:
            return
        step = AHEAD_BYTES if advice == mmap.MADV_WILLNEED else end - first
        for start in range(first, end, step):
            self._maps[file].madvise(advice, start, min(step, end - start))


def same_bytes(old_reader: Reader, old: TensorInfo, new_reader: Reader, new: TensorInfo) -> bool:
    """Return True if two tensors are equal in dtype, shape and bytes. They are read in parts."""
    same = (old.dtype, old.shape) == (new.dtype, new.shape)
    left, right = (
        np.frombuffer(reader.raw(tensor), np.uint8)
        for reader, tensor in ((old_reader, old), (new_reader, new))
    )
    for start in range(0, left.size if same else 0, RUN_BYTES):
        part = slice(start, start + RUN_BYTES)
        same = same and np.array_equal(left[part], right[part])
        old_reader.release_view(old, left[part])
        new_reader.release_view(new, right[part])
    return same


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Tensor that is computed from stored tensors, the `sources`.

    `dtype` is safetensors' name. `rows` computes the rows of a slice, which may have a step.
    """

    dtype: str
    shape: tuple[int, ...]
    sources: tuple[TensorInfo, ...]
    rows: Callable[[Reader, slice], Array]

    def info(self, name: str) -> TensorInfo:
        """Return the tensor's entry for an index."""
        size = num_bytes(self.dtype, self.shape)
        return TensorInfo(
            name=name,
            dtype=self.dtype,
            shape=self.shape,
            file=self.sources[0].file,
            start=0,
            end=size,
        )


class DerivedReader(Reader):
    """A reader for stored tensors, and for derived tensors by name."""

    def __init__(self, base: Reader, derived: Mapping[str, Derived]) -> None:
        super().__init__()
        self.base = base
        self._derived = derived

    def raw(self, tensor: TensorInfo) -> memoryview:
        """Return the bytes of a tensor."""
        derived = self._derived.get(tensor.name)
        if derived is None:
            return self.base.raw(tensor)
        return memoryview(_bytes(derived.rows(self.base, slice(None))).reshape(-1).data)

    def is_in_place(self, tensor: TensorInfo) -> bool:
        """Return True for a stored tensor that the base reader reads in place."""
        return tensor.name not in self._derived and self.base.is_in_place(tensor)

    def some_rows(self, tensor: TensorInfo, step: int) -> npt.NDArray[np.uint8]:
        """Return every `step`-th row as bytes. Other rows are not computed."""
        derived = self._derived.get(tensor.name)
        if derived is None:
            return self.base.some_rows(tensor, step)
        return _bytes(derived.rows(self.base, slice(None, None, step)))

    def release(self, tensors: Iterable[TensorInfo]) -> None:
        """Release the pages of tensors. For a derived tensor, release its sources."""
        for tensor in tensors:
            derived = self._derived.get(tensor.name)
            self.base.release(derived.sources if derived else (tensor,))

    def prefetch(self, tensors: Iterable[TensorInfo]) -> None:
        """Read tensors ahead. For a derived tensor, read its sources ahead."""
        for tensor in tensors:
            derived = self._derived.get(tensor.name)
            self.base.prefetch(derived.sources if derived else (tensor,))

    def release_view(self, tensor: TensorInfo, view: Array) -> None:
        """Release the pages of a view of a stored tensor."""
        if tensor.name not in self._derived:
            self.base.release_view(tensor, view)


def renamed(tensor: TensorInfo, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo:
    """Return the same bytes under another name, and with another shape of equal size if given."""
    return replace(tensor, name=name, shape=tensor.shape if shape is None else shape)


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    """Return the bytes of each row, or all bytes of an array without rows."""
    plain = np.ascontiguousarray(array)
    return plain.reshape(plain.shape[0] if plain.ndim else 1, -1).view(np.uint8)
