"""Integers that are packed inputs first: gptq, awq, auto-round and quark.

Words hold codes of one column or row, the first in the lowest bits unless a method has its own order.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.derived import Derived
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.quant_methods.base import (
    MethodConfig,
    MethodFormat,
    MethodGroup,
    Translation,
    linear_group,
)
from vexport.formats import PACKED
from vexport.formats.arguments import Arguments, QuantArgs
from vexport.formats.base import FLOAT_SCALES, GpuSupport, Parameter, exact, words
from vexport.formats.integer import PackedIntegers
from vexport.records import Json, TensorInfo

# Some rows of a tensor, computed from stored ones.
Rows = Callable[[Reader, slice], npt.NDArray[np.generic]]
Array = npt.NDArray[np.generic]
PACKED_NAMES = {"weight_packed": "qweight", "weight_scale": "scales", "weight_zero_point": "qzeros"}

# Bits of a code that methods of integers have, and usually; which of them vLLM runs is each method's.
MOST_BITS, USUAL_BITS = 8, 4


class TransposedIntegers(MethodFormat, PackedIntegers):
    """Words of codes and scales, inputs first, which Marlin and others run with inputs as they are."""

    weight = "qweight"
    names = PACKED_NAMES
    transposed = True

    def gpu_support(self, args: Arguments) -> GpuSupport:
        return GpuSupport(input_bits={75: 16}, stored_bits=16)


def integer_group(
    name: str, stored_as: MethodFormat, config: MethodConfig, bits: Json, size: Json, *, symmetric: bool
) -> MethodGroup:
    """Weight-only integers in groups, or with a scale for each row; `config` notes what is no number."""
    for key, value in (("bits", bits), ("group_size", size)):
        if value is not None and type(value) is not int:
            config.wrong(key, "a number", repr(value))
    if type(bits) is int and not 0 < bits <= MOST_BITS:
        config.wrong("bits", f"1 to {MOST_BITS}", str(bits))
    group = size if type(size) is int and size > 0 else None
    weights = QuantArgs(
        num_bits=bits if type(bits) is int and 0 < bits <= MOST_BITS else USUAL_BITS,
        type="int",
        symmetric=symmetric,
        strategy="group" if group else "channel",
        group_size=group,
        observer="minmax",
    )
    return linear_group(name, stored_as, weights, None, PACKED)


def transposed_words(args: Arguments, shape: tuple[int, int], *, packed_by: str) -> Mapping[str, Parameter]:
    """qweight, qzeros and scales of a layer (out, in), inputs first; codes packed along one side."""
    out_features, in_features = shape
    bits, groups = args.weights.num_bits, in_features // (args.weights.group or in_features or 1)
    codes = (
        (words(in_features, bits), out_features)
        if packed_by == "in"
        else (in_features, words(out_features, bits))
    )
    return {
        "qweight": exact("I32", codes, along=(0, 1)),
        "qzeros": exact("I32", (groups, words(out_features, bits)), along=(0, 1)),
        "scales": Parameter(
            dtypes=FLOAT_SCALES,
            shape=(groups, out_features),
            dtype="BF16",
            along=(0, 1) if groups > 1 else (1,),
            in_model_dtype=True,
        ),
    }


def packed_integers(
    stored: Mapping[str, TensorInfo],
    shape: tuple[int, int],
    codes: Derived,
    scales: TensorInfo,
    zeros: tuple[TensorInfo, Rows] | None,
) -> Translation:
    """A layer (out, in) as compressed-tensors packs it, from its codes in words along the inputs, its stored
    scales and, where they are read, its stored zero points with how they are read; its bias stays."""
    sizes = np.asarray(shape, np.int64)
    tensors: dict[str, TensorInfo | Derived] = {
        "weight_packed": codes,
        "weight_scale": transposed(scales, partial(transposed_rows, scales)),
        "weight_shape": Derived(
            dtype="I64", shape=(2,), sources=codes.sources, rows=lambda reader, rows: sizes[rows]
        ),
    }
    if zeros is not None:
        tensors["weight_zero_point"] = transposed(*zeros)
    return tensors | {name: stored[name] for name in ("bias",) if name in stored}


def transposed(tensor: TensorInfo, rows: Rows) -> Derived:
    """A tensor of the same dtype whose columns are the rows of a stored one."""
    sides = (tensor.shape[1], tensor.shape[0])
    return Derived(dtype=tensor.dtype, shape=sides, sources=(tensor,), rows=rows)


def transposed_rows(tensor: TensorInfo, reader: Reader, rows: slice) -> Array:
    """Columns of a stored tensor as rows, of any dtype, as bits."""
    return bits_of(reader, tensor).T[rows]


def bits_of(reader: Reader, tensor: TensorInfo) -> Array:
    """A tensor's elements as unsigned numbers of their size."""
    size = tensor.num_bytes // max(tensor.num_elements, 1)
    bits: Array = np.frombuffer(reader.raw(tensor), f"<u{size}").reshape(tensor.shape)
    return bits


def unpacked(stored: Array, bits: int, order: Sequence[int] | None = None) -> npt.NDArray[np.uint8]:
    """The codes in the words of each row, one after the other across words; `order` gives the place in a
    word of each of its codes."""
    if order is None:
        each = np.unpackbits(np.ascontiguousarray(stored, "<u4").view(np.uint8), axis=1, bitorder="little")
        weights = (1 << np.arange(bits)).astype(np.uint8)
        each = each.reshape(stored.shape[0], -1, bits) * weights
        joined: npt.NDArray[np.uint8] = each.sum(axis=2, dtype=np.uint8)
        return joined
    whole = stored.astype(np.uint32, copy=False)[:, :, None] >> (np.asarray(order) * bits).astype(np.uint32)
    codes: npt.NDArray[np.uint8] = (whole & np.uint32((1 << bits) - 1)).astype(np.uint8)
    return codes.reshape(stored.shape[0], -1)


def packed(codes: npt.NDArray[np.integer], bits: int) -> npt.NDArray[np.uint32]:
    """Words along the first dimension, the first code in the lowest bits."""
    each = (codes.astype(np.uint8)[:, None, :] >> np.arange(bits, dtype=np.uint8)[None, :, None]) & 1
    parts = np.packbits(each.reshape(-1, codes.shape[1]), axis=0, bitorder="little")
    return np.ascontiguousarray(parts.T).view("<u4").T
