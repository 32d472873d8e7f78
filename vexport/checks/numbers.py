"""Checks of the stored numbers: scales, codes, and unquantized values.

The functions read no more of a tensor than a check needs, because a model has many scales. The
module also checks how much a cast to another dtype changes the values.
"""

import math
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from vexport.architectures.layout import ATTENTION_NORM
from vexport.checkpoint.dtypes import BITS, to_numpy
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.groups import ConfigGroup, StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.numerics import GLOBAL_SCALE_NUMERATOR
from vexport.records import Finding, TensorInfo
from vexport.rules import values as rules

E4M3_NAN = 0x7F
# Scales of linear layers. The scales of the KV cache are checked separately.
LAYER_SCALES = ("weight_scale", "weight_global_scale", "input_scale", "input_global_scale")
# If a layer has at least this many scales, they are implausible if they are all equal. Exponents
# may be equal.
MANY_SCALES = 16
E8M0_BIAS = 127
# Initial value of a scale in producers, and vLLM's default for a KV cache. Calibration never gives
# exactly this value.
PLACEHOLDER = 1.0
# Number of values that are read to estimate the median of a scale.
SAMPLE = 1 << 11
# Smallest bit pattern of a positive infinity or NaN, by dtype. e4m3 has no infinity. Bit patterns
# of positive numbers, read as unsigned integers, have the same order as the numbers.
NON_FINITE_BITS = {"F8_E4M3": E4M3_NAN, "F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}
# Names of bounds and masks: input_min of Gemma 4's towers, causal_mask.
BOUNDS = re.compile(r"(^|_)(min|max|mask|bounds?)$")
# Number of elements examined at once. They fit into the processor's cache.
CHUNK_ELEMENTS = 1 << 18
# Number of elements after which the pages of a mapped file are released.
RELEASE_ELEMENTS = 1 << 24
# Smallest and largest value of each integer dtype.
INTEGERS = {
    "U8": (0, 255),
    "I8": (-128, 127),
    "I32": (-(2**31), 2**31 - 1),
    "I64": (-(2**63), 2**63 - 1),
}
# Rounding a value of at least this size to an integer changes it by at most 0.2 %. Rounding to
# bfloat16 changes a value by at most 0.4 %.
LARGE_INTEGER = 256.0
SIXTEEN_BITS = ("BF16", "F16")
# All e4m3 values of at least this size are integers, so integer storage keeps them exactly.
E4M3_INTEGERS_FROM = 8.0
# Casts between integers of the same size wrap and keep the bits.
SAME_BITS = ({"I8", "U8"}, {"I32", "U32"})
E4M3_CODES = bytes(range(256))
# Factor by which a static range may differ from a norm's bounds. Producers round, average or
# enlarge ranges, and the norm's epsilon matters for very small inputs.
RANGE_TOLERANCE = 1.5
IN_LAYER = re.compile(
    r"(?P<layer>model\.layers\.\d+\.)(?P<part>\w+)\.(?:experts\.\d+\.)?(?P<projection>\w+)$"
)
# Dtypes of scales that store exponents.
EXPONENT_DTYPES = ("U8", "F8_E8M0")


def single_value(reader: Reader, tensor: TensorInfo | None) -> float | None:
    """Return the value of a tensor with one element, or None for any other tensor."""
    if tensor is None or tensor.num_bytes == 0 or any(side != 1 for side in tensor.shape):
        return None
    return float(reader.array(tensor).reshape(-1)[0])


def positive_range(reader: Reader, tensor: TensorInfo) -> tuple[float, float] | None:
    """Return the smallest and the largest value of a floating-point scale.

    Returns None if a value is not finite or not above zero, or if the dtype stores exponents. To
    save time, the function compares bit patterns, which have the same order as positive values,
    and decodes only two of them.
    """
    if tensor.dtype not in NON_FINITE_BITS:
        return None
    bits = np.frombuffer(reader.raw(tensor), f"<u{BITS[tensor.dtype] // 8}")
    least, largest = bits.min(), bits.max()
    if least <= 0 or largest >= NON_FINITE_BITS[tensor.dtype]:
        return None
    least, largest = _decoded(least.tobytes() + largest.tobytes(), tensor.dtype)
    return float(least), float(largest)


def scale_range(reader: Reader, scale: TensorInfo) -> tuple[float, float]:
    """Return the smallest and the largest value of a valid scale."""
    if positive := positive_range(reader, scale):
        return positive
    codes = np.frombuffer(reader.raw(scale), np.uint8)
    is_exponent = scale.dtype == "U8"
    values = (
        _decoded(bytes((codes.min(), codes.max())), "U8")
        if is_exponent
        else scale_values(reader, scale)
    )
    return float(values.min()), float(values.max())


def median_magnitude(reader: Reader, scale: TensorInfo) -> float:
    """Return the median of a scale's magnitudes.

    The median of a large scale is estimated from an evenly spaced sample.
    """
    stored = np.frombuffer(reader.raw(scale), f"V{BITS[scale.dtype] // 8}")
    some = stored[:: max(stored.size // SAMPLE, 1)].tobytes()
    return float(np.median(np.abs(_decoded(some, scale.dtype))))


def scale_values(reader: Reader, tensor: TensorInfo) -> npt.NDArray[np.float64]:
    """Return the values of a scale in its shape."""
    return _decoded(reader.raw(tensor), tensor.dtype).reshape(tensor.shape)


def _decoded(data: memoryview | bytes, dtype: str) -> npt.NDArray[np.float64]:
    """Return the values of a scale. U8 values are exponents (e8m0)."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = np.asarray(to_numpy(data, dtype), dtype=np.float64)
    return np.exp2(values - E8M0_BIAS) if dtype == "U8" else values


def codes_out_of_range(
    view: CheckpointView, group: ConfigGroup, layer: StoredLayer
) -> Iterator[Finding]:
    """Report int8 codes that do not fit into the number of bits in the config group."""
    weight, half = layer.parameters.get("weight"), 2 ** (group.weights.num_bits - 1)
    if group.weights.is_float or half >= 128 or weight is None or weight.dtype != "I8":
        return
    codes = np.frombuffer(view.reader.raw(weight), np.int8)
    bad = int(np.count_nonzero((codes >= half) | (codes < -half)))
    if bad:
        yield Finding.at(
            rules.CODE_RANGE,
            weight.name,
            wrong=bad,
            count=codes.size,
            bits=group.weights.num_bits,
            least=-half,
            most=half - 1,
        )


def not_finite(view: CheckpointView) -> Iterator[Finding]:
    """Report NaN in e4m3 weights and unquantized tensors, and infinity in unquantized weights.

    Infinity in other tensors may be intended, such as bounds that disable clipping, and masks.
    """
    for tensor in view.index.tensors.values():
        if tensor.name.endswith(LAYER_SCALES) or tensor.dtype not in NON_FINITE_BITS:
            continue
        # Weights are neither scalars nor named like a bound or a mask.
        weights = bool(tensor.shape) and not BOUNDS.search(tensor.name.rpartition(".")[2])
        if bad := _count_not_finite(view, tensor, infinity=weights):
            rule = rules.NOT_FINITE if weights else rules.NOT_A_NUMBER
            yield Finding.at(rule, tensor.name, count=bad)


def _count_not_finite(view: CheckpointView, tensor: TensorInfo, *, infinity: bool) -> int:
    size = BITS[tensor.dtype] // 8
    codes = np.frombuffer(view.reader.raw(tensor), dtype=f"<u{size}")
    signed, sign = codes.view(f"<i{size}"), 1 << 8 * size - 1
    mask = codes.dtype.type(NON_FINITE_BITS[tensor.dtype])
    bad = 0
    for start in range(0, codes.size, CHUNK_ELEMENTS):
        part = codes[start : start + CHUNK_ELEMENTS]
        # NaN and infinity of either sign have the largest bits. Comparing the maximum is faster
        # than counting them.
        if part.max() >= sign | mask or signed[start : start + CHUNK_ELEMENTS].max() >= mask:
            magnitudes = part & ~codes.dtype.type(sign)
            bad += int(
                np.count_nonzero(magnitudes >= mask if infinity or size == 1 else magnitudes > mask)
            )
        if start % RELEASE_ELEMENTS == 0:
            view.reader.release([tensor])
    view.reader.release([tensor])
    return bad


def is_zero(view: CheckpointView, tensor: TensorInfo) -> bool:
    """Return True if a tensor contains only zeros.

    The tensor is read in parts, and the pages of each part are released.
    """
    if view.reader.is_hole(tensor):
        return True
    data = np.frombuffer(view.reader.raw(tensor), np.uint8)
    for start in range(0, data.size, RELEASE_ELEMENTS):
        if data[start : start + RELEASE_ELEMENTS].any():
            return False
        view.reader.release([tensor])
    return True


def all_zero_tensors(view: CheckpointView) -> Iterator[Finding]:
    """Report embeddings, output heads and norms that contain only zeros.

    No trained model has such tensors. Model classes whose norms multiply by `1 + weight` are
    skipped, because their norm weights may be zero.
    """
    layout = view.model.layout
    if layout is None or layout.norms_above_one or not layout.norm_before_mlp:
        return
    names = [f"{table}.weight" for table in layout.tables]
    names += [name for name in layout.parameters if name.endswith("norm.weight")]
    for name in names:
        tensor = view.index.tensors.get(name)
        if tensor is None or not tensor.num_bytes or tensor.dtype not in ("BF16", "F16", "F32"):
            continue
        if is_zero(view, tensor):
            yield Finding.at(rules.ALL_ZERO, name)


def is_lossless_cast(reader: Reader, tensor: TensorInfo, dtype: str) -> bool:
    """Return True if a tensor keeps its values when vLLM copies it to a parameter of `dtype`.

    Returns False if the stored dtype is narrower than `dtype`, because the producer then rounded
    the values before storing them.
    """
    if {tensor.dtype, dtype} in SAME_BITS:
        return True
    is_integer = tensor.dtype.startswith(("I", "U"))
    is_wider = dtype == "I64" or BITS[tensor.dtype] > BITS[dtype]
    if not is_wider or is_integer and dtype in ("F16", "BF16", "F32"):
        return False  # the producer rounded the values
    values = reader.floats(tensor)
    if dtype in INTEGERS:
        low, high = INTEGERS[dtype]
        return bool(np.all((values == np.floor(values)) & (values >= low) & (values <= high)))
    if dtype == "F8_E4M3":
        whole = not is_integer or bool(values.min(initial=E4M3_INTEGERS_FROM) >= E4M3_INTEGERS_FROM)
        return whole and bool(np.isin(values, to_numpy(E4M3_CODES, dtype)).all())
    return bool(np.array_equal(values, rounded(values, dtype)))


def is_rounding_negligible(reader: Reader, tensor: TensorInfo) -> bool:
    """Return True if rounding a single scale to its dtype hardly affects the model's outputs."""
    if tensor.dtype in SIXTEEN_BITS:
        return True
    return tensor.dtype in INTEGERS and bool(
        reader.floats(tensor).min(initial=LARGE_INTEGER) >= LARGE_INTEGER
    )


def rounded(values: np.typing.NDArray[np.float64], dtype: str) -> np.typing.NDArray[np.float64]:
    """Round the values to a floating-point dtype.

    BF16 is truncated instead of rounded to the nearest value. Callers only test whether the result
    equals the input.
    """
    with np.errstate(over="ignore"):
        if dtype == "F16":
            return values.astype(np.float16).astype(np.float64)
        single = values.astype(np.float32)
    if dtype == "BF16":
        single = (single.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return single.astype(np.float64)


def impossible_input_scale(
    view: CheckpointView, group: ConfigGroup, layer: StoredLayer
) -> Iterator[Finding]:
    """Report a static input scale that does not fit the possible outputs of the preceding norm."""
    scale, bounds = _static_scale(view, group, layer), norm_bounds(view, layer.name)
    if scale is None or bounds is None:
        return
    (name, largest), (least, most) = scale, bounds
    if largest > most * RANGE_TOLERANCE:
        yield Finding.at(rules.LARGER_THAN_NORM, name, largest=largest, most=most)
    elif largest < least / RANGE_TOLERANCE:
        yield Finding.at(rules.SMALLER_THAN_NORM, name, largest=largest, least=least)


def _static_scale(
    view: CheckpointView, group: ConfigGroup, layer: StoredLayer
) -> tuple[str, float] | None:
    """Return the name of a layer's static input scale and the largest input that it represents.

    Returns None if the layer has no static input scale.
    """
    if scale := layer.filled("input_scale"):
        value = float(np.abs(view.reader.floats(scale)).max())
        return scale.name, group.storage.largest_input * value
    if global_scale := layer.filled("input_global_scale"):
        return global_scale.name, GLOBAL_SCALE_NUMERATOR / float(
            view.reader.floats(global_scale).min()
        )
    return None


def norm_bounds(view: CheckpointView, module: str) -> tuple[float, float] | None:
    """Return a lower and an upper bound of the largest output of the norm before a layer.

    Returns None if the norm cannot be found.

    RMSNorm divides by the root mean square of `hidden_size` values. No output is therefore larger
    than sqrt(hidden_size) times the largest weight of the norm, whatever the prompt. The lower
    bound follows from the values before the multiplication with the weights: their root mean square
    is 1 for each token. The largest output is therefore at least the square root of the harmonic
    mean of the squared weights.
    """
    match, architecture = IN_LAYER.match(module), view.model.architecture
    # The inputs of these projections are outputs of other layers, not of a norm.
    without_norm = {*architecture.row_parallel}
    if architecture.experts is not None:
        without_norm.add(architecture.experts.down)
    before_mlp = view.model.layout.norm_before_mlp if view.model.layout is not None else ""
    if match is None or match["projection"] in without_norm or not before_mlp:
        return None
    norm = ATTENTION_NORM if match["part"] == "self_attn" else before_mlp
    tensor = view.index.tensors.get(f"{match['layer']}{norm}.weight")
    if tensor is None or not tensor.num_bytes:
        return None
    return norm_output_bounds(view, tensor)


def norm_output_bounds(view: CheckpointView, tensor: TensorInfo) -> tuple[float, float]:
    """Return a lower and an upper bound of the largest value that a norm can output.

    The upper bound is also an upper bound of the output vector's length.
    """
    offset = 1.0 if view.model.layout is not None and view.model.layout.norms_above_one else 0.0
    weights = np.abs(view.reader.floats(tensor) + offset)
    with np.errstate(divide="ignore"):
        least = float(np.mean(weights**-2.0) ** -0.5)
    return least, math.sqrt(weights.size) * float(weights.max())


def largest_output(view: CheckpointView, module: str) -> float | None:
    """Return an upper bound of a quantized layer's outputs if a norm precedes the layer.

    Returns None if there is no bound. The bound includes a tolerance. It is the length of the input
    times the length of a weight row (Cauchy-Schwarz inequality), plus the bias. If a norm follows
    the layer (`k_norm`), the bound is the largest output of this norm instead.
    """
    norm = view.index.tensors.get(f"{module.removesuffix('proj')}norm.weight")
    if (
        norm is not None
        and norm.num_bytes
        and view.model.layout is not None
        and view.model.layout.norm_before_mlp
    ):
        return RANGE_TOLERANCE * norm_output_bounds(view, norm)[1]
    layer, bounds = view.layers.by_name.get(module), norm_bounds(view, module)
    if layer is None or layer.group is None or bounds is None:
        return None
    shape, largest = view.layers.shape_of(layer), _largest_weight(view, layer.group, layer)
    if shape is None or largest is None:
        return None
    bias = layer.filled("bias")
    offset = float(np.abs(view.reader.floats(bias)).max()) if bias is not None else 0.0
    return RANGE_TOLERANCE * (bounds[1] * math.sqrt(shape[1]) * largest + offset)


def _largest_weight(view: CheckpointView, group: ConfigGroup, layer: StoredLayer) -> float | None:
    scale, global_scale = layer.filled("weight_scale"), layer.filled("weight_global_scale")
    if scale is None or scale.dtype in EXPONENT_DTYPES:
        return None
    if global_scale is None and "weight_global_scale" in layer.parameters:
        return None
    stored = float(view.reader.floats(global_scale).min()) if global_scale is not None else 1.0
    code = group.weights.largest_code
    largest = float(np.abs(view.reader.floats(scale)).max())
    return None if code is None or not math.isfinite(largest) else largest * code / stored
