"""Which tensors a quantized layer must have, from the arguments of its config group."""

from collections.abc import Mapping
from dataclasses import dataclass

from vexport.checks.vllm.arguments import ConfigGroup
from vexport.checks.vllm.scheme import SchemeKind, scheme_of
from vexport.numerics.constants import INT32_BITS
from vexport.types import TensorInfo

FLOAT_SCALES = frozenset({"F32", "BF16", "F16"})
# Global scales are float32 by definition: another dtype has rounded them.
GLOBAL_SCALES = frozenset({"F32"})
FP4 = (SchemeKind.NVFP4, SchemeKind.MXFP4)
E4M3 = (SchemeKind.FP8, SchemeKind.MXFP8)
# Schemes that may quantize inputs with a scale of the checkpoint.
STATIC_INPUTS = (SchemeKind.FP8, SchemeKind.INT8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One parameter: its shape, the dtypes that vLLM copies without a change of value, and its own dtype.

    `along` are the dimensions that fusing and tensor parallelism cut: 0 the layer's outputs, 1 its inputs.
    vLLM narrows what it loads along the dimension that it cuts, and compares all others.
    """

    dtypes: frozenset[str]
    shape: tuple[int, ...]
    dtype: str = "F32"
    along: tuple[int, ...] = ()


def expected_parameters(
    group: ConfigGroup, parameters: Mapping[str, TensorInfo]
) -> Mapping[str, Expected] | None:
    """The parameters of a layer by name; None where its weight is missing or its shape cannot be told.

    The layer's shape comes from its stored weight.
    """
    shape = linear_shape(group, parameters)
    return None if shape is None else parameters_of(group, *shape)


def parameters_of(group: ConfigGroup, rows: int, columns: int) -> Mapping[str, Expected]:
    """The parameters of a layer of `rows` outputs and `columns` inputs, by name.

    Sources: `create_weights` of the schemes in
    vllm/model_executor/layers/quantization/compressed_tensors/schemes.
    """
    kind = _kind(group)
    parameters = {weight_name(group): _weight(group, rows, columns)}
    parameters["weight_scale"] = _scale(group, rows, columns)
    if kind is SchemeKind.NVFP4:
        parameters["weight_global_scale"] = _single(GLOBAL_SCALES)
    if kind is SchemeKind.PACKED:
        parameters["weight_shape"] = _exact("I64", (2,), "I32")
    if not group.weights.symmetric:
        parameters["weight_zero_point"] = _zero_point(group, rows, columns)
    return {**parameters, **_inputs(group)}


def weight_name(group: ConfigGroup) -> str:
    """`weight_packed` where several values share a word, else `weight` with a byte a value."""
    return "weight_packed" if _kind(group) in (*FP4, SchemeKind.PACKED) else "weight"


def linear_shape(group: ConfigGroup, parameters: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
    """(out_features, in_features) of a stored weight."""
    stored = parameters.get(weight_name(group))
    if stored is None or len(stored.shape) != 2:
        return None
    rows, columns = stored.shape
    if weight_name(group) == "weight":
        return rows, columns
    if _kind(group) in FP4:
        return rows, columns * 2
    scale, size = parameters.get("weight_scale"), group.weights.group_size
    if scale is not None and len(scale.shape) == 2 and size and size > 0:
        from_scale = scale.shape[1] * size
        if -(-from_scale * group.weights.num_bits // INT32_BITS) == columns:
            return rows, from_scale
    return rows, columns * INT32_BITS // group.weights.num_bits


def _kind(group: ConfigGroup) -> SchemeKind:
    """The scheme that vLLM takes; where it refuses the group, the one that comes closest to its storage."""
    found = scheme_of(group)
    if isinstance(found, SchemeKind):
        return found
    args = group.weights
    if args.type == "float":
        four = SchemeKind.NVFP4 if args.strategy == "tensor_group" else SchemeKind.MXFP4
        return SchemeKind.FP8 if args.num_bits == 8 else four
    return SchemeKind.PACKED if "pack" in group.format else SchemeKind.INT8


def _weight(group: ConfigGroup, rows: int, columns: int) -> Expected:
    kind = _kind(group)
    if kind in FP4:
        return _exact("U8", (rows, columns // 2), along=(0, 1))
    if kind is SchemeKind.PACKED:
        words = -(-columns * group.weights.num_bits // INT32_BITS)
        return _exact("I32", (rows, words), along=(0, 1))
    return _exact("F8_E4M3" if kind in E4M3 else "I8", (rows, columns), along=(0, 1))


def _scale(group: ConfigGroup, rows: int, columns: int) -> Expected:
    weights, kind = group.weights, _kind(group)
    if weights.strategy == "tensor":
        return _single(FLOAT_SCALES)
    if weights.strategy == "block" and weights.block_structure:
        high, wide = weights.block_structure
        shape = (-(-rows // high), -(-columns // wide))
        return Expected(dtypes=FLOAT_SCALES, shape=shape, along=(0, 1))
    if weights.strategy == "channel" or not weights.group_size or weights.group_size < 0:
        return Expected(dtypes=FLOAT_SCALES, shape=(rows, 1), along=(0,))
    shape = (rows, columns // weights.group_size)
    if kind is SchemeKind.NVFP4:
        return _exact("F8_E4M3", shape, along=(0, 1))
    if kind in (SchemeKind.MXFP4, SchemeKind.MXFP8):
        # Not F8_E8M0: vLLM's parameter is uint8 and `copy_` would cast the value, not the bits.
        return _exact("U8", shape, along=(0, 1))
    return Expected(dtypes=FLOAT_SCALES, shape=shape, dtype="BF16", along=(0, 1))


def _zero_point(group: ConfigGroup, rows: int, columns: int) -> Expected:
    words = -(-rows * group.weights.num_bits // INT32_BITS)
    return _exact("I32", (words, _scale(group, rows, columns).shape[-1]), along=(0, 1))


def _inputs(group: ConfigGroup) -> dict[str, Expected]:
    inputs, kind = group.input_activations, _kind(group)
    if inputs is None:
        return {}
    if kind is SchemeKind.NVFP4:
        return {"input_global_scale": _single(GLOBAL_SCALES)}
    if inputs.dynamic or kind not in STATIC_INPUTS:
        return {}
    parameters = {"input_scale": _single(FLOAT_SCALES)}
    if kind is SchemeKind.INT8 and not inputs.symmetric:
        parameters["input_zero_point"] = _exact("I8", (1,))
    return parameters


def _single(dtypes: frozenset[str]) -> Expected:
    return Expected(dtypes=dtypes, shape=(1,))


def _exact(dtype: str, shape: tuple[int, ...], *also: str, along: tuple[int, ...] = ()) -> Expected:
    return Expected(dtypes=frozenset({dtype, *also}), shape=shape, dtype=dtype, along=along)
