"""Data types of safetensors: bits per element, and their storage in numpy."""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

# Source: safetensors/src/tensor.rs, enum Dtype.
BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}

_NUMPY = {
    "BOOL": "?",
    "I8": "i1",
    "U8": "u1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "I64": "<i8",
    "U64": "<u8",
    "F64": "<f8",
}


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes that a tensor takes in a safetensors file."""
    return math.prod(shape) * BITS[dtype] // 8


def to_numpy(data: memoryview | bytes, dtype: str) -> npt.NDArray[np.generic]:
    """Decode raw little-endian bytes to a flat numpy array, with BF16 and 8-bit floats as float32.

    Raises ValueError for dtypes without a decoder here (F4, C64).
    """
    if dtype in _NUMPY:
        plain: npt.NDArray[np.generic] = np.frombuffer(data, dtype=_NUMPY[dtype])
        return plain
    if dtype == "BF16":
        bits: npt.NDArray[np.uint32] = np.left_shift(
            np.frombuffer(data, dtype="<u2"), 16, dtype=np.uint32
        )
        return bits.view(np.float32)
    if dtype in _DECODERS:
        codes: npt.NDArray[np.uint8] = np.frombuffer(data, dtype="u1")
        return np.take(_DECODERS[dtype], codes)
    raise ValueError(
        f"{dtype}: got a dtype without decoder, need one of {sorted([*_NUMPY, 'BF16', *_DECODERS])}"
    )


_CODES = np.arange(256, dtype=np.uint16)


def _e4m3_table() -> npt.NDArray[np.float32]:
    """Return the values of e4m3: seven bits of magnitude and a sign, no infinity.

    All magnitude bits of NaN are ones (OCP 8-bit Floating Point, 5).
    """
    exponent, fraction = (_CODES >> 3 & 15).astype(np.int32), (_CODES & 7) / 8
    values = np.where(exponent, np.ldexp(1 + fraction, exponent - 7), np.ldexp(fraction, -6))
    values[_CODES & 127 == 127] = np.nan
    return np.array(np.where(_CODES & 128, -values, values), dtype=np.float32)


def _e8m0_table() -> npt.NDArray[np.float32]:
    """Return powers of two from 2^-127 to 2^127, and NaN for 255.

    Source: OCP Microscaling Formats, revision 1.0.
    """
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return np.array(values, dtype=np.float32)


_DECODERS = {
    "F8_E4M3": _e4m3_table(),
    "F8_E5M2": (_CODES << 8).view(np.float16).astype(np.float32),  # a float16 without its last byte
    "F8_E8M0": _e8m0_table(),
}
