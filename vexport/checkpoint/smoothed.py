"""Read the tensors of a source with smoothed channels.

Smoothing multiplies the rows of a tensor by powers of two, and the columns of a later tensor in the
same layer by the inverse powers. The model's outputs stay bit-identical, because a multiplication
by a power of two only changes the exponent of a float. The quantized checkpoint contains the
exponents in `smoothing.json`.
"""

import base64
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.reader import Reader
from vexport.errors import InputError
from vexport.files import from_json, to_json, write_text
from vexport.records import Smoothing, TensorInfo
from vexport.rules import checkpoint as rules

SMOOTHING = "smoothing.json"
# Channels are scaled by 2^8 at most.
MAX_EXPONENT = 8
# Name of a decoder layer, at the start of its tensors' names.
LAYER = re.compile(r".*?\.\d+\.")
# Number of cached tensors. Weights are read in runs of rows, and the first run of a tensor may be
# read before the last run of the previous tensor.
MAX_CACHED_TENSORS = 2
# Maximum number of elements that are scaled at a time.
RUN_ELEMENTS = 1 << 24
# dtypes that can be scaled. BF16 is viewed as its bits.
VIEWS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
Array = npt.NDArray[np.generic]
Exponents = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """Exponents of a checkpoint's tensors, by the source's names."""

    tensors: Mapping[str, Smoothing]


class SmoothedReader(Reader):
    """A reader of a source that applies the smoothing to each tensor that it returns."""

    def __init__(self, smoothing: Mapping[str, Smoothing]) -> None:
        super().__init__()
        self._smoothing = smoothing
        self._last: dict[str, Array] = {}
        self._scaling = Lock()

    def raw(self, tensor: TensorInfo) -> memoryview:
        """Return the bytes of a tensor.

        A smoothed tensor is a copy. The last MAX_CACHED_TENSORS copies are cached.
        """
        exponents = self._smoothing.get(tensor.name)
        if exponents is None:
            return super().raw(tensor)
        with self._scaling:
            if tensor.name not in self._last:
                while len(self._last) >= MAX_CACHED_TENSORS:
                    del self._last[next(iter(self._last))]
                self._last[tensor.name] = _scaled(super().raw(tensor), tensor, exponents)
            return self._last[tensor.name].data.cast("B")

    def is_in_place(self, tensor: TensorInfo) -> bool:
        """Return True if a tensor is not smoothed. Its bytes are then equal to the file's bytes."""
        return tensor.name not in self._smoothing and super().is_in_place(tensor)

    def release_view(self, tensor: TensorInfo, view: Array) -> None:
        """Release the pages of a view. Views of a smoothed copy have no pages of the file."""
        if tensor.name not in self._smoothing:
            super().release_view(tensor, view)

    def prefetch_view(self, tensor: TensorInfo, view: Array) -> None:
        """Read ahead for a view. Views of a smoothed copy are already in memory."""
        if tensor.name not in self._smoothing:
            super().prefetch_view(tensor, view)


def source_reader(checkpoint: Path) -> Reader:
    """Return a reader of the source of vexport's checkpoint, with the smoothing of the export."""
    return reader_of(smoothing_of(checkpoint))


def smoothing_of(checkpoint: Path) -> Mapping[str, Smoothing]:
    """Return the smoothing of a checkpoint's source.

    Raises:
        InputError: If the exponents cannot be read, or if no other tensor of the same layer has the
        inverse exponents.
    """
    path = checkpoint / SMOOTHING
    if not os.path.lexists(path):
        return {}
    smoothing = from_json(_File, path).tensors
    rows, columns = set[tuple[str, bytes]](), set[tuple[str, bytes]]()
    for name, scaling in smoothing.items():
        layer = LAYER.match(name)
        for text, known in ((scaling.rows, rows), (scaling.columns, columns)):
            exponents = _exponents(text, f"{path}: {name}")
            if exponents.any():
                exponents = exponents if known is rows else -exponents
                known.add((layer[0] if layer else "", exponents.tobytes()))
    for place, _ in sorted(rows ^ columns):
        raise InputError.of(rules.EXPONENTS_WITHOUT_INVERSE, f"{path}: {place}")
    return smoothing


def _exponents(text: str, where: str) -> Exponents:
    """Decode exponents. Raise InputError if one exceeds MAX_EXPONENT.

    vexport writes no larger exponents. They could turn any weight into infinity or zero.
    """
    try:
        exponents = decode(text)
    except ValueError:
        raise InputError.of(rules.EXPONENTS, where) from None
    if (largest := int(np.abs(exponents.astype(np.int32)).max(initial=0))) > MAX_EXPONENT:
        raise InputError.of(rules.LARGE_EXPONENT, where, value=largest, most=MAX_EXPONENT)
    return exponents


def reader_of(smoothing: Mapping[str, Smoothing]) -> Reader:
    """Return a reader of a source. Its tensors are smoothed if `smoothing` is not empty."""
    return SmoothedReader(smoothing) if smoothing else Reader()


def write_smoothing(smoothing: Mapping[str, Smoothing], folder: Path) -> None:
    """Write the exponents next to the weights. Write no file if there are no exponents."""
    if smoothing:
        write_text(folder / SMOOTHING, to_json(_File(tensors=smoothing)))


def encode(exponents: Exponents) -> str:
    """Return exponents as JSON text: base64 of their bytes."""
    return base64.b64encode(exponents.astype(np.int8).tobytes()).decode("ascii")


def decode(text: str) -> Exponents:
    """Decode the text that `encode` returns."""
    return np.frombuffer(base64.b64decode(text, validate=True), np.int8)


def fits(tensor: TensorInfo, smoothing: Smoothing) -> bool:
    """Return True if a tensor's dtype can be scaled and its shape matches the exponents."""
    if tensor.dtype not in VIEWS or len(tensor.shape) not in (1, 2):
        return False
    sizes = (*tensor.shape, 1)[:2]
    return all(
        decode(text).size in (0, size)
        for text, size in zip((smoothing.rows, smoothing.columns), sizes, strict=True)
    )


def _scaled(stored: memoryview, tensor: TensorInfo, smoothing: Smoothing) -> Array:
    """Return values times 2^(row's exponent + column's exponent), with the shape (rows, columns).

    The result has the tensor's dtype. BF16 is returned as its bits (uint16).
    """
    if not fits(tensor, smoothing):
        raise InputError.of(
            rules.OTHER_SMOOTHED_SOURCE,
            f"{tensor.file}: {tensor.name}",
            dtype=tensor.dtype,
            shape=list(tensor.shape),
            file=SMOOTHING,
        )
    rows, columns = (decode(text).astype(np.int32) for text in (smoothing.rows, smoothing.columns))
    height, width = (*tensor.shape, 1)[:2]
    rows = rows if rows.size else np.zeros(height, np.int32)
    columns = columns if columns.size else np.zeros(width, np.int32)
    values: Array = np.frombuffer(stored, VIEWS[tensor.dtype]).reshape(height, width)
    out = np.empty_like(values)
    with np.errstate(over="ignore", under="ignore"):
        for part in _parts(height, width):
            out[part] = _multiply_by_powers(values[part], rows[part, None] + columns)
    return out


def _multiply_by_powers(values: Array, exponents: npt.NDArray[np.int32]) -> Array:
    if values.dtype != np.uint16:
        return np.ldexp(values, exponents)
    wide = (values.astype(np.uint32) << 16).view(np.float32)
    return (np.ldexp(wide, exponents).view(np.uint32) >> 16).astype(np.uint16)


def _parts(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, RUN_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, start + step)
