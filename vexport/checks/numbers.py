"""The numbers that a checkpoint stores: scales, read no further than a question needs, as most are
one byte and there are many; codes and plain values that no weight has; what a cast to another dtype
leaves of them.
"""

import math
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from vexport.architectures.layout import ATTENTION_NORM
from vexport.checkpoint.dtypes import BITS, to_numpy
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.findings import error
from vexport.checks.vllm.groups import ConfigGroup, StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.numerics import GLOBAL_SCALE_NUMERATOR
from vexport.records import Finding, TensorInfo

# The family of these findings.
CHECK = "values"
E4M3_NAN = 0x7F
# Scales of linear layers; those of the KV cache are separate.
LAYER_SCALES = ("weight_scale", "weight_global_scale", "input_scale", "input_global_scale")
# This many scales of a layer are never all equal, unless they are exponents.
MANY = 16
E8M0_BIAS = 127
# A scale that calibration never gives: a producer's initial value, and vLLM's default for a KV
# cache.
PLACEHOLDER = 1.0
# The number of values that estimates a scale's median.
SAMPLE = 1 << 11
# Bits that are all set in NaN and infinity, by dtype: e4m3 has no infinity, and its NaN has them
# all. Those of finite positive numbers are smaller, and in their order.
NOT_FINITE = {"F8_E4M3": E4M3_NAN, "F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}
# Names of bounds and masks: input_min of Gemma 4's towers, causal_mask.
BOUNDS = re.compile(r"(^|_)(min|max|mask|bounds?)$")
# Elements examined at once, as fit a processor's cache; elements after which pages are released.
RUN, RELEASED = 1 << 18, 1 << 24
INTEGERS = {
    "U8": (0, 255),
    "I8": (-128, 127),
    "I32": (-(2**31), 2**31 - 1),
    "I64": (-(2**63), 2**63 - 1),
}
# From here on a whole number is within .2 % of what it was rounded from; bfloat16 is within .4 %.
WHOLE = 256.0
SIXTEEN_BITS = ("BF16", "F16")
# From here on the values of e4m3 are whole numbers: integers have kept them.
WHOLE_E4M3 = 8.0
# Integers of one size wrap: the bits stay.
SAME_BITS = ({"I8", "U8"}, {"I32", "U32"})
E4M3_CODES = bytes(range(256))
# Ranges that are rounded, averaged or given some room; inputs so small that the norm's epsilon
# counts.
MARGIN = 1.5
IN_LAYER = re.compile(
    r"(?P<layer>model\.layers\.\d+\.)(?P<part>\w+)\.(?:experts\.\d+\.)?(?P<projection>\w+)$"
)
# Scales that are exponents.
BYTES = ("U8", "F8_E8M0")


def single_value(reader: Reader, tensor: TensorInfo | None) -> float | None:
    """Return the value of a tensor with one element, None for all other tensors."""
    if tensor is None or tensor.num_bytes == 0 or any(side != 1 for side in tensor.shape):
        return None
    return float(reader.array(tensor).reshape(-1)[0])


def positive_ends(reader: Reader, tensor: TensorInfo) -> tuple[float, float] | None:
    """The least and the largest number of a scale of floats, where all are finite and above zero:
    told from their bits."""
    if tensor.dtype not in NOT_FINITE:
        return None
    bits = np.frombuffer(reader.raw(tensor), f"<u{BITS[tensor.dtype] // 8}")
    least, largest = bits.min(), bits.max()
    if least <= 0 or largest >= NOT_FINITE[tensor.dtype]:
        return None
    least, largest = _decoded(least.tobytes() + largest.tobytes(), tensor.dtype)
    return float(least), float(largest)


def ends_of(reader: Reader, scale: TensorInfo) -> tuple[float, float]:
    """The least and the largest of a scale's values, which have been found sound."""
    if positive := positive_ends(reader, scale):
        return positive
    codes = np.frombuffer(reader.raw(scale), np.uint8)
    is_exponent = scale.dtype == "U8"
    values = (
        _decoded(bytes((codes.min(), codes.max())), "U8") if is_exponent else numbers(reader, scale)
    )
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


def beyond(view: CheckpointView, group: ConfigGroup, layer: StoredLayer) -> Iterator[Finding]:
    """Codes in bytes that the announced bits do not hold."""
    weight, half = layer.parameters.get("weight"), 2 ** (group.weights.num_bits - 1)
    if group.weights.is_float or half >= 128 or weight is None or weight.dtype != "I8":
        return
    codes = np.frombuffer(view.reader.raw(weight), np.int8)
    bad = int(np.count_nonzero((codes >= half) | (codes < -half)))
    if bad:
        expected = f"codes of {group.weights.num_bits} bits, from {-half} to {half - 1}"
        got = f"{bad} of {codes.size} beyond them"
        yield error(CHECK, weight.name, expected=expected, got=got, fix="correct num_bits")


def not_finite(view: CheckpointView) -> Iterator[Finding]:
    """NaN in payloads of e4m3 and in what is not quantized, and infinity where that holds weights:
    of other values it may be meant, as of bounds between which nothing is clipped and of masks."""
    for tensor in view.index.tensors.values():
        if tensor.name.endswith(LAYER_SCALES) or tensor.dtype not in NOT_FINITE:
            continue
        # Neither a bound nor a mask by name, and more than one number.
        weights = bool(tensor.shape) and not BOUNDS.search(tensor.name.rpartition(".")[2])
        if bad := _count_not_finite(view, tensor, infinity=weights):
            expected = "finite values" if weights else "numbers"
            got = f"{bad} values NaN{' or infinite' if weights else ''}"
            fix = "export again, and look at this tensor in the source"
            yield error(CHECK, tensor.name, expected=expected, got=got, fix=fix)


def _count_not_finite(view: CheckpointView, tensor: TensorInfo, *, infinity: bool) -> int:
    size = BITS[tensor.dtype] // 8
    codes = np.frombuffer(view.reader.raw(tensor), dtype=f"<u{size}")
    signed, sign = codes.view(f"<i{size}"), 1 << 8 * size - 1
    mask = codes.dtype.type(NOT_FINITE[tensor.dtype])
    bad = 0
    for start in range(0, codes.size, RUN):
        part = codes[start : start + RUN]
        # Of either sign they have the largest bits, which takes less time to see than to count
        # them.
        if part.max() >= sign | mask or signed[start : start + RUN].max() >= mask:
            magnitudes = part & ~codes.dtype.type(sign)
            bad += int(
                np.count_nonzero(magnitudes >= mask if infinity or size == 1 else magnitudes > mask)
            )
        if start % RELEASED == 0:
            view.reader.release([tensor])
    view.reader.release([tensor])
    return bad


def is_zero(view: CheckpointView, tensor: TensorInfo) -> bool:
    """Return whether a tensor has zeros only; a part at a time, pages are given back."""
    if view.reader.is_hole(tensor):
        return True
    data = np.frombuffer(view.reader.raw(tensor), np.uint8)
    for start in range(0, data.size, RELEASED):
        if data[start : start + RELEASED].any():
            return False
        view.reader.release([tensor])
    return True


def empty(view: CheckpointView) -> Iterator[Finding]:
    """Embeddings, heads and norms without any number but zero: no trained model has them.

    A class whose norms multiply by one more than their weight is passed over.
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
            fix = "export again, and look at this tensor in the source"
            yield error(CHECK, name, expected="numbers other than zero", got="zeros only", fix=fix)


def is_lossless_cast(reader: Reader, tensor: TensorInfo, dtype: str) -> bool:
    """Return whether a tensor's values are all kept when vLLM's `copy_` casts them to a parameter's
    dtype.
    """
    if {tensor.dtype, dtype} in SAME_BITS:
        return True
    is_integer = tensor.dtype.startswith(("I", "U"))
    is_wider = dtype == "I64" or BITS[tensor.dtype] > BITS[dtype]
    if not is_wider or is_integer and dtype in ("F16", "BF16", "F32"):
        return False  # of another dtype: its values have been rounded already
    values = reader.floats(tensor)
    if dtype in INTEGERS:
        low, high = INTEGERS[dtype]
        return bool(np.all((values == np.floor(values)) & (values >= low) & (values <= high)))
    if dtype == "F8_E4M3":
        whole = not is_integer or bool(values.min(initial=WHOLE_E4M3) >= WHOLE_E4M3)
        return whole and bool(np.isin(values, to_numpy(E4M3_CODES, dtype)).all())
    return bool(np.array_equal(values, rounded(values, dtype)))


def is_rounded_little(reader: Reader, tensor: TensorInfo) -> bool:
    """Return whether what a single scale lost when it was stored in this dtype moves no answer by
    much.
    """
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


def impossible(view: CheckpointView, group: ConfigGroup, layer: StoredLayer) -> Iterator[Finding]:
    """A finding on a scale for inputs that the layer's norm cannot make."""
    scale, bounds = _static_scale(view, group, layer), norm_bounds(view, layer.name)
    if scale is None or bounds is None:
        return
    (name, largest), (least, most) = scale, bounds
    got = f"one for inputs up to {largest:.3g}"
    fix = "calibrate again: the number is no scale of this layer, or upside down"
    if largest > most * MARGIN:
        expected = f"a scale for inputs up to {most:.3g}, all that the norm before lets through"
        yield error(CHECK, name, expected=expected, got=got, fix=fix)
    elif largest < least / MARGIN:
        expected = (
            f"a scale for inputs of at least {least:.3g}, which the norm before makes of any token"
        )
        yield error(CHECK, name, expected=expected, got=got, fix=fix)


def _static_scale(
    view: CheckpointView, group: ConfigGroup, layer: StoredLayer
) -> tuple[str, float] | None:
    """A layer's static scale by its name, and the largest input that it represents; None without
    one.
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
    """Between what the largest output of the norm before a layer lies; None where that is not
    known.

    RMSNorm divides by the root mean square of `hidden_size` values: none of its outputs is larger
    than sqrt(hidden_size) times the norm's largest weight, whatever the prompt. Nor are all outputs
    of a token small: before they are multiplied by the weights their root mean square is 1, so that
    the largest is at least the root of the harmonic mean of the squared weights.
    """
    match, architecture = IN_LAYER.match(module), view.model.architecture
    after_others = (*architecture.row_parallel, *(architecture.experts or ())[1:2])
    before_mlp = view.model.layout.norm_before_mlp if view.model.layout is not None else ""
    if match is None or match["projection"] in after_others or not before_mlp:
        return None
    norm = ATTENTION_NORM if match["part"] == "self_attn" else before_mlp
    tensor = view.index.tensors.get(f"{match['layer']}{norm}.weight")
    if tensor is None or not tensor.num_bytes:
        return None
    return reach(view, tensor)


def reach(view: CheckpointView, tensor: TensorInfo) -> tuple[float, float]:
    """Between what the largest output of a norm lies; the second is the most of their length,
    too.
    """
    offset = 1.0 if view.model.layout is not None and view.model.layout.norms_above_one else 0.0
    weights = np.abs(view.reader.floats(tensor) + offset)
    with np.errstate(divide="ignore"):
        least = float(np.mean(weights**-2.0) ** -0.5)
    return least, math.sqrt(weights.size) * float(weights.max())


def largest_output(view: CheckpointView, module: str) -> float | None:
    """No output of a quantized layer behind a norm is larger, with some room; None where that is
    not known.

    That is the length of the input times that of a row of the weight (Cauchy and Schwarz), and the
    bias; where keys have their own norm, what that lets through.
    """
    norm = view.index.tensors.get(f"{module.removesuffix('proj')}norm.weight")
    if (
        norm is not None
        and norm.num_bytes
        and view.model.layout is not None
        and view.model.layout.norm_before_mlp
    ):
        return MARGIN * reach(view, norm)[1]
    layer, bounds = view.layers.by_name.get(module), norm_bounds(view, module)
    if layer is None or layer.group is None or bounds is None:
        return None
    shape, largest = view.layers.shape_of(layer), _largest_weight(view, layer.group, layer)
    if shape is None or largest is None:
        return None
    bias = layer.filled("bias")
    offset = float(np.abs(view.reader.floats(bias)).max()) if bias is not None else 0.0
    return MARGIN * (bounds[1] * math.sqrt(shape[1]) * largest + offset)


def _largest_weight(view: CheckpointView, group: ConfigGroup, layer: StoredLayer) -> float | None:
    """The largest weight that a layer's scales can make."""
    scale, global_scale = layer.filled("weight_scale"), layer.filled("weight_global_scale")
    if scale is None or scale.dtype in BYTES:
        return None
    if global_scale is None and "weight_global_scale" in layer.parameters:
        return None
    stored = float(view.reader.floats(global_scale).min()) if global_scale is not None else 1.0
    code = group.weights.largest_code
    largest = float(np.abs(view.reader.floats(scale)).max())
    return None if code is None or not math.isfinite(largest) else largest * code / stored
