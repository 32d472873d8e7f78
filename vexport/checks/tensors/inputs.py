"""Static scales of inputs, and how large keys and values can be, by the norm that inputs come from.

RMSNorm divides by the root mean square of `hidden_size` values: none of its outputs is larger than
sqrt(hidden_size) times the norm's largest weight, whatever the prompt. Nor are all outputs of a token small:
before they are multiplied by the weights their root mean square is 1, so that the largest is at least the
root of the harmonic mean of the squared weights.
"""

import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from vexport.checks.tensors.numbers import CHECK
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.layout import ATTENTION_NORM
from vexport.checks.vllm.view import CheckpointView, error
from vexport.numerics.constants import GLOBAL_SCALE_NUMERATOR
from vexport.records import Finding, TensorInfo

# Ranges that are rounded, averaged or given some room; inputs so small that the norm's epsilon counts.
MARGIN = 1.5
IN_LAYER = re.compile(
    r"(?P<layer>model\.layers\.\d+\.)(?P<part>\w+)\.(?:experts\.\d+\.)?(?P<projection>\w+)$"
)
# Scales that are exponents.
BYTES = ("U8", "F8_E8M0")


def impossible(
    view: CheckpointView, group: ConfigGroup, members: Mapping[str, Mapping[str, TensorInfo]]
) -> Iterator[Finding]:
    """Findings on scales for inputs that the layer's norm cannot make."""
    for module, parameters in members.items():
        scale, bounds = _static_scale(view, group, parameters), norm_bounds(view, module)
        if scale is None or bounds is None:
            continue
        (name, largest), (least, most) = scale, bounds
        got = f"one for inputs up to {largest:.3g}"
        fix = "calibrate again: the number is no scale of this layer, or upside down"
        if largest > most * MARGIN:
            expected = f"a scale for inputs up to {most:.3g}, all that the norm before lets through"
            yield error(CHECK, name, expected=expected, got=got, fix=fix)
        elif largest < least / MARGIN:
            expected = f"a scale for inputs of at least {least:.3g}, which the norm before makes of any token"
            yield error(CHECK, name, expected=expected, got=got, fix=fix)


def _static_scale(
    view: CheckpointView, group: ConfigGroup, parameters: Mapping[str, TensorInfo]
) -> tuple[str, float] | None:
    """A layer's static scale by its name, and the largest input that it represents; None without one."""
    scale, global_scale = parameters.get("input_scale"), parameters.get("input_global_scale")
    if scale is not None and scale.num_bytes:
        value = float(np.abs(view.reader.floats(scale)).max())
        return scale.name, group.storage.largest_input * value
    if global_scale is not None and global_scale.num_bytes:
        return global_scale.name, GLOBAL_SCALE_NUMERATOR / float(view.reader.floats(global_scale).min())
    return None


def norm_bounds(view: CheckpointView, module: str) -> tuple[float, float] | None:
    """Between what the largest output of the norm before a layer lies; None where that is not known."""
    match, architecture = IN_LAYER.match(module), view.architecture
    after_others = (*architecture.row_parallel, *(architecture.experts or ())[1:2])
    before_mlp = view.layout.norm_before_mlp if view.layout is not None else ""
    if match is None or match["projection"] in after_others or not before_mlp:
        return None
    norm = ATTENTION_NORM if match["part"] == "self_attn" else before_mlp
    tensor = view.index.tensors.get(f"{match['layer']}{norm}.weight")
    if tensor is None or not tensor.num_bytes:
        return None
    return reach(view, tensor)


def reach(view: CheckpointView, tensor: TensorInfo) -> tuple[float, float]:
    """Between what the largest output of a norm lies; the second is the most of their length, too."""
    offset = 1.0 if view.layout is not None and view.layout.norms_above_one else 0.0
    weights = np.abs(view.reader.floats(tensor) + offset)
    with np.errstate(divide="ignore"):
        least = float(np.mean(weights**-2.0) ** -0.5)
    return least, math.sqrt(weights.size) * float(weights.max())


def largest_output(view: CheckpointView, module: str) -> float | None:
    """No output of a quantized layer behind a norm is larger, with some room; None where that is not known.

    That is the length of the input times that of a row of the weight (Cauchy and Schwarz), and the bias;
    where keys have their own norm, what that lets through.
    """
    norm = view.index.tensors.get(f"{module.removesuffix('proj')}norm.weight")
    if norm is not None and norm.num_bytes and view.layout is not None and view.layout.norm_before_mlp:
        return MARGIN * reach(view, norm)[1]
    layer, bounds = view.layers.get(module), norm_bounds(view, module)
    if layer is None or layer.group is None or bounds is None:
        return None
    shape = view.linear_shape(layer.group, module, layer.parameters)
    largest = _largest_weight(view, layer.group, layer.parameters)
    if shape is None or largest is None:
        return None
    bias = layer.parameters.get("bias")
    offset = float(np.abs(view.reader.floats(bias)).max()) if bias is not None and bias.num_bytes else 0.0
    return MARGIN * (bounds[1] * math.sqrt(shape[1]) * largest + offset)


def _largest_weight(
    view: CheckpointView, group: ConfigGroup, parameters: Mapping[str, TensorInfo]
) -> float | None:
    """The largest weight that a layer's scales can make."""
    scale = parameters.get("weight_scale")
    global_scale = parameters.get("weight_global_scale")
    if scale is None or scale.dtype in BYTES or not scale.num_bytes:
        return None
    if global_scale is not None and not global_scale.num_bytes:
        return None
    stored = float(view.reader.floats(global_scale).min()) if global_scale is not None else 1.0
    code = group.weights.largest_code
    largest = float(np.abs(view.reader.floats(scale)).max())
    return None if code is None or not math.isfinite(largest) else largest * code / stored
