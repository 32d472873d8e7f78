"""Feeds vLLM's loader tensors without data: shapes and dtypes from the headers of safetensors files."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import safetensors
import torch

# The names of safetensors/src/tensor.rs.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}


class Witness(Protocol):
    """Who wants to know which tensors were handed out."""

    def handed_out(self, name: str, tensor: torch.Tensor) -> None: ...


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class _File(Protocol):
    """What safetensors' own class offers; its stubs have no types."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def keys(self) -> Sequence[str]: ...

    def metadata(self) -> dict[str, str] | None: ...

    def get_slice(self, name: str) -> _Slice: ...


class HeaderFile:
    """`safetensors.safe_open` whose tensors are on the meta device; the file itself is checked as ever."""

    def __init__(self, filename: str, witness: Witness) -> None:
        self._file: _File = safetensors.safe_open(filename, framework="np")
        self._witness = witness

    def __enter__(self) -> "HeaderFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def keys(self) -> Sequence[str]:
        """The names in the file, in its order."""
        return self._file.keys()

    def metadata(self) -> dict[str, str] | None:
        """The file's own metadata."""
        return self._file.metadata()

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor of the stored shape and dtype without data."""
        header = self._file.get_slice(name)
        tensor = torch.empty(header.get_shape(), dtype=_DTYPES[header.get_dtype()], device="meta")
        self._witness.handed_out(name, tensor)
        return tensor


def opener(witness: Witness) -> Callable[..., HeaderFile]:
    """What takes the place of `safe_open` in vLLM's weight_utils."""

    def open_header(filename: str, framework: str = "pt", device: str = "cpu") -> HeaderFile:
        return HeaderFile(filename, witness)

    return open_header
