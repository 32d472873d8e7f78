"""How large the keys and values of an attention layer can be, by its norm and its weights."""

import math
from collections.abc import Mapping

import numpy as np

from vexport.checks.tensors.inputs import MARGIN, norm_bounds, reach
from vexport.checks.vllm.layers import layers_of
from vexport.checks.vllm.view import CheckpointView, ConfigGroup
from vexport.types import TensorInfo

# Scales that are exponents.
BYTES = ("U8", "F8_E8M0")


def largest_output(view: CheckpointView, module: str) -> float | None:
    """No output of a quantized layer behind a norm is larger, with some room; None where that is not known.

    That is the length of the input times that of a row of the weight (Cauchy and Schwarz), and the bias;
    where keys have their own norm, what that lets through.
    """
    norm = view.index.tensors.get(f"{module.removesuffix('proj')}norm.weight")
    if norm is not None and norm.num_bytes and view.layout is not None:
        return MARGIN * reach(view, norm)[1]
    layer, bounds = layers_of(view).get(module), norm_bounds(view, module)
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
