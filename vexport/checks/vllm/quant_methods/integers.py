"""Integers that are stored with the inputs first, for gptq, awq, auto-round and quark.

The module also reads the method `awq`, which has zero points. A 32-bit word holds codes of one
column or row. The first code is in the lowest bits, unless a method uses another order. Source of
awq: vllm/model_executor/layers/quantization/auto_awq.py.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from vexport.checkpoint.reader import Derived, Reader
from vexport.checks.vllm.quant_methods.base import (
    MethodConfig,
    MethodFormat,
    MethodGroup,
    QuantMethod,
    Translation,
    contains_listed,
    linear_group,
)
from vexport.formats.arguments import Arguments, QuantArgs
from vexport.formats.base import FLOAT_SCALES, GpuSupport, Parameter, exact, words
from vexport.formats.integer import PackedIntegers
from vexport.numerics import INT32_BITS
from vexport.records import Json, TensorInfo
from vexport.rules import config as rules

Array = npt.NDArray[np.generic]
# Largest and usual number of bits of a code. Each method defines which widths vLLM runs.
MAX_BITS, USUAL_BITS = 8, 4
# Number of codes in a word that is packed along the outputs. A signed code is the unsigned code
# minus SIGN.
CODES, SIGN = INT32_BITS // USUAL_BITS, 8
SOURCE = "auto_awq.py"
# Position in a word of each of its eight codes (_REVERSE_AWQ_PACK_ORDER).
AWQ_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)
LAYOUT = "gemm"


class TransposedIntegers(MethodFormat, PackedIntegers):
    """Words of codes (in*bits/32, out), scales (groups, out) and zero points (groups, out*bits/32).

    Marlin and other kernels run these weights with unquantized inputs. If `positions` is set, 4-bit
    codes are packed along the outputs instead, (in, out/8), each at its position in a word.
    Symmetric codes are then signed. `zero_offset` is added to a stored zero point.
    """

    names = {"weight_packed": "qweight", "weight_scale": "scales", "weight_zero_point": "qzeros"}
    transposed = True
    positions: Sequence[int] = ()
    zero_offset = 0

    def gpu_support(self, args: Arguments) -> GpuSupport:
        return GpuSupport(input_bits={75: 16}, stored_bits=16)

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        out_features, in_features = shape
        bits, groups = (
            args.weights.num_bits,
            in_features // (args.weights.group or in_features or 1),
        )
        rows = words(out_features, bits)
        codes = (in_features, rows) if self.positions else (words(in_features, bits), out_features)
        return {
            self.weight: exact("I32", codes, along=(0, 1)),
            self.names["weight_zero_point"]: exact("I32", (groups, rows), along=(0, 1)),
            self.names["weight_scale"]: Parameter(
                dtypes=FLOAT_SCALES,
                shape=(groups, out_features),
                dtype="BF16",
                along=(0, 1) if groups > 1 else (1,),
                in_model_dtype=True,
            ),
        }

    def shape(self, args: Arguments, stored: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
        codes = stored.get(self.weight)
        if codes is None or len(codes.shape) != 2:
            return None
        (rows, columns), bits = codes.shape, args.weights.num_bits
        return (columns * CODES, rows) if self.positions else (columns, rows * INT32_BITS // bits)

    def translated(self, args: Arguments, stored: Mapping[str, TensorInfo]) -> Translation:
        """Return the tensors in compressed-tensors' layout.

        Codes are repacked along the inputs in plain order, with the outputs as rows.
        """
        shape = self.shape(args, stored)
        assert shape is not None
        codes, scales = stored[self.weight], stored[self.names["weight_scale"]]
        sizes = np.asarray(shape, np.int64)
        read = partial(self._repacked, args) if self.positions else transposed_rows
        columns = words(shape[1], args.weights.num_bits)
        tensors: dict[str, TensorInfo | Derived] = {
            "weight_packed": Derived(
                dtype="I32", shape=(shape[0], columns), sources=(codes,), rows=partial(read, codes)
            ),
            "weight_scale": transposed(scales, transposed_rows),
            "weight_shape": Derived(
                dtype="I64", shape=(2,), sources=(codes,), rows=lambda reader, rows: sizes[rows]
            ),
        }
        if not args.weights.symmetric:
            zeros = stored[self.names["weight_zero_point"]]
            tensors["weight_zero_point"] = transposed(zeros, partial(self._zero_points, args))
        return tensors | {name: stored[name] for name in ("bias",) if name in stored}

    def _repacked(self, args: Arguments, codes: TensorInfo, reader: Reader, rows: slice) -> Array:
        """Return some rows (outputs) of the weight, packed into words along the inputs."""
        chosen = np.arange(codes.shape[1] * CODES)[rows]
        in_words, positions = np.divmod(chosen, CODES)
        shifts = (np.asarray(self.positions)[positions] * USUAL_BITS).astype(np.uint32)
        values = (bits_of(reader, codes)[:, in_words].astype(np.uint32) >> shifts) & np.uint32(15)
        return packed(values ^ np.uint32(SIGN if args.weights.symmetric else 0), USUAL_BITS).T

    def _zero_points(
        self, args: Arguments, zeros: TensorInfo, reader: Reader, rows: slice
    ) -> Array:
        """Return the effective zero points, packed into words along the outputs."""
        values = (
            unpacked(bits_of(reader, zeros), args.weights.num_bits, self.positions)
            + self.zero_offset
        )
        return packed(values.T.astype(np.int64), args.weights.num_bits)[rows]


def integer_group(
    name: str,
    stored_as: MethodFormat,
    config: MethodConfig,
    bits: Json,
    size: Json,
    *,
    symmetric: bool,
) -> MethodGroup:
    """Return a group of weight-only integers, with a scale per group or per row.

    Adds problems to `config` if `bits` or `size` is not a valid number.
    """
    for key, value in (("bits", bits), ("group_size", size)):
        if value is not None and type(value) is not int:
            config.add_problem(rules.INTEGER, key, value=value)
    if type(bits) is int and not 0 < bits <= MAX_BITS:
        config.add_problem(rules.BITS, "bits", value=bits, most=MAX_BITS)
    group = size if type(size) is int and size > 0 else None
    weights = QuantArgs(
        num_bits=bits if type(bits) is int and 0 < bits <= MAX_BITS else USUAL_BITS,
        type="int",
        symmetric=symmetric,
        strategy="group" if group else "channel",
        group_size=group,
        observer="minmax",
    )
    return linear_group(name, stored_as, weights, None)


def transposed(tensor: TensorInfo, rows: Callable[[TensorInfo, Reader, slice], Array]) -> Derived:
    """Return the transpose of a stored tensor in the same dtype.

    `rows` reads some rows of the transpose.
    """
    sides = (tensor.shape[1], tensor.shape[0])
    return Derived(dtype=tensor.dtype, shape=sides, sources=(tensor,), rows=partial(rows, tensor))


def transposed_rows(tensor: TensorInfo, reader: Reader, rows: slice) -> Array:
    """Return some columns of a stored tensor of any dtype as rows of raw bits."""
    return bits_of(reader, tensor).T[rows]


def bits_of(reader: Reader, tensor: TensorInfo) -> Array:
    """Return a tensor's elements as unsigned integers of the same size."""
    size = tensor.num_bytes // max(tensor.num_elements, 1)
    bits: Array = np.frombuffer(reader.raw(tensor), f"<u{size}").reshape(tensor.shape)
    return bits


def unpacked(stored: Array, bits: int, positions: Sequence[int] = ()) -> npt.NDArray[np.uint8]:
    """Return the codes in each row of words. Codes may cross word boundaries.

    `positions` has the position in a word of each of its codes.
    """
    each = np.unpackbits(
        np.ascontiguousarray(stored, "<u4").view(np.uint8), axis=1, bitorder="little"
    )
    weights = (1 << np.arange(bits)).astype(np.uint8)
    codes = (each.reshape(stored.shape[0], -1, bits) * weights).sum(axis=2, dtype=np.uint8)
    if positions:
        codes = codes.reshape(*stored.shape, -1)[:, :, np.asarray(positions)].reshape(codes.shape)
    unsigned: npt.NDArray[np.uint8] = codes
    return unsigned


def packed(codes: npt.NDArray[np.integer], bits: int) -> npt.NDArray[np.uint32]:
    """Pack codes into words along the first dimension, with the first code in the lowest bits."""
    each = (
        codes.astype(np.uint8)[:, None, :] >> np.arange(bits, dtype=np.uint8)[None, :, None]
    ) & 1
    parts = np.packbits(each.reshape(-1, codes.shape[1]), axis=0, bitorder="little")
    return np.ascontiguousarray(parts.T).view("<u4").T


class Awq(TransposedIntegers):
    """Tensors qweight (in, out/8), qzeros (groups, out/8) and scales (groups, out)."""

    positions: Sequence[int] = AWQ_POSITIONS

    def refusal(self, args: Arguments) -> str | None:
        bits = args.weights.num_bits
        return None if bits == USUAL_BITS else f"{bits} bits; vLLM only supports {USUAL_BITS}"


def read(config: MethodConfig) -> QuantMethod:
    """Return the method as vLLM reads it.

    If the config lists no unquantized layers, vLLM leaves layers unquantized if they are stored
    unquantized.
    """
    values = config.values
    bits, size = config.required("w_bit", "bits"), config.required("q_group_size", "group_size")
    if config.required("zero_point") is False:
        config.add_problem(rules.NO_ZERO_POINTS, "zero_point")
    version = str(values.get("version", LAYOUT)).lower()
    if version != LAYOUT:
        config.add_problem(rules.AWQ_LAYOUT, "version", layout=version, known=LAYOUT)
    kept = config.names("modules_to_not_convert")
    group = integer_group("awq", Awq("awq"), config, bits, size, symmetric=False)

    def group_of(layer: str, name: str) -> MethodGroup | None:
        if not kept:
            return group if layer.endswith(".experts") or name in config.quantized else None
        return None if contains_listed(layer, kept) or contains_listed(name, kept) else group

    return QuantMethod(
        name="awq",
        skip_key="modules_to_not_convert",
        groups=(group,),
        group_of=group_of,
        quantizes_head=values.get("lm_head") is True,
    )
