"""What vLLM's `copy_` makes of a tensor that is stored in another dtype than its parameter's."""

import numpy as np

from vexport.checkpoint.dtypes import to_numpy
from vexport.checkpoint.reader import Reader
from vexport.types import TensorInfo

WIDER_THAN_BYTES = ("I16", "I32", "I64", "F16", "BF16", "F32", "F64")
# Parameter dtype -> dtypes that hold all its values. A tensor of another dtype has been rounded already.
CONTAINED_IN = {
    "F8_E4M3": WIDER_THAN_BYTES,
    "U8": WIDER_THAN_BYTES,
    "I8": WIDER_THAN_BYTES,
    "I32": ("I64", "F64"),
    "I64": ("I16", "I32", "F16", "BF16", "F32", "F64"),
    "F16": ("F32", "F64"),
    "BF16": ("F32", "F64"),
    "F32": ("F64",),
}
INTEGERS = {"U8": (0, 255), "I8": (-128, 127), "I32": (-(2**31), 2**31 - 1), "I64": (-(2**63), 2**63 - 1)}
# From here on a whole number is within .2 % of what it was rounded from; bfloat16 is within .4 %.
WHOLE = 256.0
SIXTEEN_BITS = ("BF16", "F16")
# From here on the values of e4m3 are whole numbers: integers have kept them.
WHOLE_E4M3 = 8.0
# Integers of one size wrap: the bits stay.
SAME_BITS = ({"I8", "U8"}, {"I32", "U32"})
E4M3_CODES = bytes(range(256))


def is_lossless_cast(reader: Reader, tensor: TensorInfo, dtype: str) -> bool:
    """Whether a tensor's values are all kept when they are cast to a parameter's dtype."""
    if {tensor.dtype, dtype} in SAME_BITS:
        return True
    if tensor.dtype not in CONTAINED_IN.get(dtype, ()):
        return False
    values = reader.floats(tensor)
    if dtype in INTEGERS:
        low, high = INTEGERS[dtype]
        return bool(np.all((values == np.floor(values)) & (values >= low) & (values <= high)))
    if dtype == "F8_E4M3":
        whole = tensor.dtype not in WIDER_THAN_BYTES[:3] or bool(values.min(initial=WHOLE_E4M3) >= WHOLE_E4M3)
        return whole and bool(np.isin(values, to_numpy(E4M3_CODES, dtype)).all())
    return bool(np.array_equal(values, rounded(values, dtype)))


def is_rounded_little(reader: Reader, tensor: TensorInfo) -> bool:
    """Whether what a single scale lost when it was stored in this dtype moves no answer by much."""
    if tensor.dtype in SIXTEEN_BITS:
        return True
    return tensor.dtype in INTEGERS and bool(reader.floats(tensor).min(initial=WHOLE) >= WHOLE)


def rounded(values: np.typing.NDArray[np.float64], dtype: str) -> np.typing.NDArray[np.float64]:
    """Values as a floating dtype holds them; BF16 is cut, which only serves to compare."""
    with np.errstate(over="ignore"):
        if dtype == "F16":
            return values.astype(np.float16).astype(np.float64)
        single = values.astype(np.float32)
    if dtype == "BF16":
        single = (single.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return single.astype(np.float64)
