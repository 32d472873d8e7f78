"""Which tensors a quantized layer must have, from the arguments of its config group."""

from collections.abc import Mapping
from dataclasses import dataclass

from vexport.checks.arguments import ConfigGroup
from vexport.types import TensorInfo

FLOAT_SCALES = frozenset({"F32", "BF16", "F16"})
# Global scales are float32 by definition: another dtype has rounded them.
GLOBAL_SCALES = frozenset({"F32"})
INT32_BITS = 32


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
    group: ConfigGroup, leaves: Mapping[str, TensorInfo]
) -> Mapping[str, Expected] | None:
    """The parameters of a layer by name; None where its weight is missing or its sides cannot be told.

    The layer's sides come from its stored weight.
    """
    sides = layer_sides(group, leaves)
    return None if sides is None else parameters_of(group, *sides)


def parameters_of(group: ConfigGroup, rows: int, columns: int) -> Mapping[str, Expected]:
    """The parameters of a layer of `rows` outputs and `columns` inputs, by name.

    Sources: `create_weights` of the schemes in
    vllm/model_executor/layers/quantization/compressed_tensors/schemes.
    """
    parameters = {weight_name(group): _weight(group, rows, columns)}
    parameters["weight_scale"] = _scale(group, rows, columns)
    if group.weights.strategy == "tensor_group":
        parameters["weight_global_scale"] = _single(GLOBAL_SCALES)
    if weight_name(group) == "weight_packed" and group.weights.type == "int":
        parameters["weight_shape"] = Expected(dtypes=frozenset({"I64", "I32"}), shape=(2,), dtype="I64")
    if not group.weights.symmetric:
        parameters["weight_zero_point"] = _zero_point(group, rows, columns)
    return {**parameters, **_inputs(group)}


def weight_name(group: ConfigGroup) -> str:
    """`weight_packed` where several values share a word, else `weight` with a byte a value."""
    fp4 = group.weights.type == "float" and group.weights.num_bits < 8
    return "weight_packed" if fp4 or "pack-quantized" in group.format else "weight"


def layer_sides(group: ConfigGroup, leaves: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
    """(out_features, in_features) of a stored weight."""
    stored = leaves.get(weight_name(group))
    if stored is None or len(stored.shape) != 2:
        return None
    rows, columns = stored.shape
    if weight_name(group) == "weight":
        return rows, columns
    if group.weights.type == "float":
        return rows, columns * 2
    scale, size = leaves.get("weight_scale"), group.weights.group_size
    if scale is not None and len(scale.shape) == 2 and size and size > 0:
        from_scale = scale.shape[1] * size
        if -(-from_scale * group.weights.num_bits // INT32_BITS) == columns:
            return rows, from_scale
    return rows, columns * INT32_BITS // group.weights.num_bits


def _weight(group: ConfigGroup, rows: int, columns: int) -> Expected:
    if weight_name(group) == "weight":
        dtype = "F8_E4M3" if group.weights.type == "float" else "I8"
        shape = (rows, columns)
    elif group.weights.type == "float":
        dtype, shape = "U8", (rows, columns // 2)
    else:
        dtype, shape = "I32", (rows, -(-columns * group.weights.num_bits // INT32_BITS))
    return Expected(dtypes=frozenset({dtype}), shape=shape, dtype=dtype, along=(0, 1))


def _scale(group: ConfigGroup, rows: int, columns: int) -> Expected:
    weights = group.weights
    if weights.strategy == "tensor":
        return _single(FLOAT_SCALES)
    if weights.strategy == "block" and weights.block_structure:
        high, wide = weights.block_structure
        shape = (-(-rows // high), -(-columns // wide))
        return Expected(dtypes=FLOAT_SCALES, shape=shape, along=(0, 1))
    if weights.strategy == "channel" or not weights.group_size or weights.group_size < 0:
        return Expected(dtypes=FLOAT_SCALES, shape=(rows, 1), along=(0,))
    dtype, dtypes = "BF16", FLOAT_SCALES
    if weights.strategy == "tensor_group":
        dtype, dtypes = "F8_E4M3", frozenset({"F8_E4M3"})
    elif weights.type == "float":
        # Not F8_E8M0: vLLM's parameter is uint8 and `copy_` would cast the value, not the bits.
        dtype, dtypes = "U8", frozenset({"U8"})
    return Expected(dtypes=dtypes, shape=(rows, columns // weights.group_size), dtype=dtype, along=(0, 1))


def _zero_point(group: ConfigGroup, rows: int, columns: int) -> Expected:
    words = -(-rows * group.weights.num_bits // INT32_BITS)
    shape = (words, _scale(group, rows, columns).shape[-1])
    return Expected(dtypes=frozenset({"I32"}), shape=shape, dtype="I32", along=(0, 1))


def _inputs(group: ConfigGroup) -> dict[str, Expected]:
    inputs = group.input_activations
    if inputs is None or inputs.dynamic is True:
        return {}
    if inputs.strategy == "tensor_group":
        return {"input_global_scale": _single(GLOBAL_SCALES)}
    parameters = {"input_scale": _single(FLOAT_SCALES)}
    if inputs.type == "int" and not inputs.symmetric:
        parameters["input_zero_point"] = Expected(dtypes=frozenset({"I8"}), shape=(1,), dtype="I8")
    return parameters


def _single(dtypes: frozenset[str]) -> Expected:
    return Expected(dtypes=dtypes, shape=(1,))
