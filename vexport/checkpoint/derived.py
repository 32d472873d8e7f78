"""Tensors that are computed from those of a checkpoint when they are asked for."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.dtypes import num_bytes
from vexport.checkpoint.reader import Reader
from vexport.records import TensorInfo

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A tensor of safetensors' `dtype`; `rows` computes some of its rows, contiguous or not.

    `sources` are the stored tensors that it is computed from.
    """

    dtype: str
    shape: tuple[int, ...]
    sources: tuple[TensorInfo, ...]
    rows: Callable[[Reader, slice], Array]

    def info(self, name: str) -> TensorInfo:
        """Its entry in an index."""
        size = num_bytes(self.dtype, self.shape)
        return TensorInfo(
            name=name, dtype=self.dtype, shape=self.shape, file=self.sources[0].file, start=0, end=size
        )


class DerivedReader(Reader):
    """A reader of stored tensors, and of derived ones by their names."""

    def __init__(self, base: Reader, derived: Mapping[str, Derived]) -> None:
        super().__init__()
        self.base = base
        self._derived = derived

    def raw(self, tensor: TensorInfo) -> memoryview:
        """The bytes of a tensor."""
        derived = self._derived.get(tensor.name)
        if derived is None:
            return self.base.raw(tensor)
        return memoryview(_bytes(derived.rows(self.base, slice(None))).reshape(-1).data)

    def is_in_place(self, tensor: TensorInfo) -> bool:
        """Return whether a tensor is a stored one, in a local file."""
        return tensor.name not in self._derived and self.base.is_in_place(tensor)

    def some_rows(self, tensor: TensorInfo, step: int) -> npt.NDArray[np.uint8]:
        """Every `step`-th row as bytes; no other rows are computed."""
        derived = self._derived.get(tensor.name)
        if derived is None:
            return self.base.some_rows(tensor, step)
        return _bytes(derived.rows(self.base, slice(None, None, step)))

    def release(self, tensors: Iterable[TensorInfo]) -> None:
        """Give back the pages of tensors, of derived ones those that they are computed from."""
        for tensor in tensors:
            derived = self._derived.get(tensor.name)
            self.base.release(derived.sources if derived else (tensor,))

    def release_view(self, tensor: TensorInfo, view: Array) -> None:
        """The same for a view of a stored tensor."""
        if tensor.name not in self._derived:
            self.base.release_view(tensor, view)


def renamed(tensor: TensorInfo, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo:
    """The same bytes under another name, and in another shape of as many elements."""
    return replace(tensor, name=name, shape=tensor.shape if shape is None else shape)


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    """The bytes of each row; of an array without rows, of all."""
    plain = np.ascontiguousarray(array)
    return plain.reshape(plain.shape[0] if plain.ndim else 1, -1).view(np.uint8)
