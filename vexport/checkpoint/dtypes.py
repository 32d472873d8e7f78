"""The dtypes of safetensors: bits per element and their numpy storage."""

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

FLOATING = frozenset({"F16", "BF16", "F32", "F64"})

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
    """Bytes that a tensor takes in a safetensors file."""
    return math.prod(shape) * BITS[dtype] // 8


def to_numpy(data: memoryview | bytes, dtype: str) -> npt.NDArray[np.generic]:
    """Decode raw little-endian bytes to a flat numpy array; BF16 and the 8-bit floats become float32.

    Raises ValueError for a dtype that has no decoder here (F4, C64).
    """
    if dtype in _NUMPY:
        plain: npt.NDArray[np.generic] = np.frombuffer(data, dtype=_NUMPY[dtype])
        return plain
    if dtype == "BF16":
        bits: npt.NDArray[np.uint32] = np.left_shift(np.frombuffer(data, dtype="<u2"), 16, dtype=np.uint32)
        return bits.view(np.float32)
    if dtype in _DECODERS:
        codes: npt.NDArray[np.uint8] = np.frombuffer(data, dtype="u1")
        return np.take(_DECODERS[dtype], codes)
    raise ValueError(
        f"{dtype}: got a dtype without decoder, need one of {sorted([*_NUMPY, 'BF16', *_DECODERS])}"
    )


def _float8_table(exponent_bits: int, bias: int, *, finite: bool) -> npt.NDArray[np.float32]:
    """All 256 values of an 8-bit float (OCP 8-bit Floating Point Specification, revision 1.0, section 5)."""
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(256, dtype=np.int64)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    normal = np.ldexp(1.0 + fraction, exponent - bias)
    values = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), normal)
    values = np.where(codes & 0x80, -values, values)
    top = exponent == (1 << exponent_bits) - 1
    if finite:  # e4m3fn: only the all-ones mantissa is NaN, there is no infinity
        values[top & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    else:
        values[top & (mantissa != 0)] = np.nan
        values[top & (mantissa == 0)] = np.where(codes[top & (mantissa == 0)] & 0x80, -np.inf, np.inf)
    return np.array(values, dtype=np.float32)


def _float8_e8m0_table() -> npt.NDArray[np.float32]:
    """Powers of two from 2^-127 to 2^127; 255 is NaN (OCP Microscaling Formats, revision 1.0)."""
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return np.array(values, dtype=np.float32)


_DECODERS = {
    "F8_E4M3": _float8_table(4, 7, finite=True),
    "F8_E5M2": _float8_table(5, 15, finite=False),
    "F8_E8M0": _float8_e8m0_table(),
}
