"""The numbers of scales, read no further than a question needs: most are one byte, and there are many."""

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.dtypes import BITS, to_numpy
from vexport.checkpoint.reader import Reader
from vexport.types import TensorInfo

E4M3_NAN = 0x7F
# Of a linear layer; those of the KV cache are apart.
LAYER_SCALES = ("weight_scale", "weight_global_scale", "input_scale", "input_global_scale")
# So many scales of a layer are never all equal, but for exponents.
MANY = 16
E8M0_BIAS = 127
# A scale that no calibration gives: what a producer begins with, and what vLLM takes where a cache has none.
PLACEHOLDER = 1.0
# So many values of a scale show its middle.
SAMPLE = 1 << 14


def above_zero(reader: Reader, tensor: TensorInfo) -> bool:
    """Whether all codes of e4m3 are those of finite numbers above zero: told from two of them."""
    codes = np.frombuffer(reader.raw(tensor), np.uint8)
    return bool(codes.min() > 0 and codes.max() < E4M3_NAN)


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
    return float(np.median(np.abs(_decoded(some, scale.dtype))))


def numbers(reader: Reader, tensor: TensorInfo) -> npt.NDArray[np.float64]:
    """The values of a scale in its shape."""
    return _decoded(reader.raw(tensor), tensor.dtype).reshape(tensor.shape)


def _decoded(data: memoryview | bytes, dtype: str) -> npt.NDArray[np.float64]:
    """The values of a scale; bytes are exponents."""
    with np.errstate(invalid="ignore"):  # NaN of the signalling kind
        values = np.asarray(to_numpy(data, dtype), dtype=np.float64)
    return np.exp2(values - E8M0_BIAS) if dtype == "U8" else values
