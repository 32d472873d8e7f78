"""The numbers of scales, read no further than a question needs: most are one byte, and there are many."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.dtypes import BITS, to_numpy
from vexport.checkpoint.reader import Reader
from vexport.records import TensorInfo

E4M3_NAN = 0x7F
# Of a linear layer; those of the KV cache are apart.
LAYER_SCALES = ("weight_scale", "weight_global_scale", "input_scale", "input_global_scale")
# So many scales of a layer are never all equal, but for exponents.
MANY = 16
E8M0_BIAS = 127
# A scale that no calibration gives: what a producer begins with, and what vLLM takes where a cache has none.
PLACEHOLDER = 1.0
# So many values of a scale show its middle.
SAMPLE = 1 << 11


# The integer that the bits of a positive number are, in the same order; and from which on they are no number.
POSITIVE = {
    "F8_E4M3": ("u1", E4M3_NAN),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F800000),
}


def positive_ends(reader: Reader, tensor: TensorInfo) -> tuple[float, float] | None:
    """The least and the largest number of a scale, where its dtype is in POSITIVE and all of them are finite
    and above zero: told from their bits."""
    if tensor.dtype not in POSITIVE:
        return None
    kind, end = POSITIVE[tensor.dtype]
    bits = np.frombuffer(reader.raw(tensor), kind)
    least, largest = bits.min(), bits.max()
    if least <= 0 or largest >= end:
        return None
    least, largest = _decoded(least.tobytes() + largest.tobytes(), tensor.dtype)
    return float(least), float(largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The number of a scale's values of each kind; `negative` has the negative infinity too."""

    size: int
    nan: int
    infinite: int
    zero: int
    negative: int

    @property
    def positive(self) -> int:
        return self.size - self.nan - self.zero - self.negative


def counts(reader: Reader, tensor: TensorInfo) -> Counts:
    """The kinds of a scale's numbers."""
    values = numbers(reader, tensor)
    kinds = np.isnan(values), np.isinf(values), values == 0, values < 0
    nan, infinite, zero, negative = (int(np.count_nonzero(kind)) for kind in kinds)
    return Counts(size=values.size, nan=nan, infinite=infinite, zero=zero, negative=negative)


def ends(reader: Reader, scale: TensorInfo) -> tuple[float, float]:
    """The least and the largest of a scale's values, which have been found sound."""
    if scale.dtype in ("U8", "F8_E4M3"):
        codes = np.frombuffer(reader.raw(scale), np.uint8) & np.uint8(0xFF if scale.dtype == "U8" else 0x7F)
        values = _decoded(bytes((codes.min(), codes.max())), scale.dtype)
    else:
        values = numbers(reader, scale)
    return float(values.min()), float(values.max())


def middling(reader: Reader, scale: TensorInfo) -> float:
    """The median of a scale's magnitudes, of many values that of some from all over it."""
    stored = np.frombuffer(reader.raw(scale), f"V{BITS[scale.dtype] // 8}")
    some = stored[:: max(stored.size // SAMPLE, 1)].tobytes()
    magnitudes = np.abs(_decoded(some, scale.dtype))
    middle = [(magnitudes.size - 1) // 2, magnitudes.size // 2]
    return float(np.partition(magnitudes, middle)[middle].mean())


def numbers(reader: Reader, tensor: TensorInfo) -> npt.NDArray[np.float64]:
    """The values of a scale in its shape."""
    return _decoded(reader.raw(tensor), tensor.dtype).reshape(tensor.shape)


def _decoded(data: memoryview | bytes, dtype: str) -> npt.NDArray[np.float64]:
    """The values of a scale; bytes are exponents."""
    with np.errstate(invalid="ignore"):  # NaN of the signalling kind
        values = np.asarray(to_numpy(data, dtype), dtype=np.float64)
    return np.exp2(values - E8M0_BIAS) if dtype == "U8" else values
