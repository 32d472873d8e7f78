"""Check that dtypes and shapes agree with the config group and with the model's config."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from vexport.architectures.fusion import FusedLayer
from vexport.architectures.layout import ModelLayout, Shape
from vexport.architectures.ranks import Split, parts_of, split_of
from vexport.architectures.stored import JOINED
from vexport.checks.kv_cache import QUERY_SCALE, SCALES
from vexport.checks.numbers import is_lossless_cast, is_rounding_negligible, rounded
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.view import CheckpointView
from vexport.formats.base import EXPERT, Parameter, partition_of
from vexport.numerics import INT32_BITS
from vexport.records import FLOATING, Finding, TensorInfo
from vexport.rules import shapes as rules

DESCRIPTION = "dtypes and shapes match the config, and the members of fused layers fit together"

# Rounding these scales to 16 bits multiplies all weights or inputs of a layer by the same factor.
# The factor differs from 1 by at most 0.4 %, far less than the errors of FP4 rounding.
GLOBAL_SCALES = (".weight_global_scale", ".input_global_scale", ".weight_scale_2")
COMPARED_SCALES = ("weight_scale", "input_scale", "weight_scale_inv", "scales")
CACHE_SCALES = tuple(f".{name}" for name in (*SCALES, QUERY_SCALE))
# Dimension along which a weight is split between ranks.
SPLIT_DIMENSIONS: Mapping[Split, int] = {"out": 0, "in": 1}


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on wrong dtypes and shapes. vLLM refuses, narrows or casts such tensors."""
    correct_projections = _correct_projections(view)
    for fused in view.model.fused_layers:
        group = view.lookup.group_of(fused)
        if group is not None and view.layers.is_quantized(fused):
            yield from _compare_widths(view, group, fused)
            yield from _whole_blocks(view, group, fused)
            yield from _quantized(view, group, fused, correct_projections)
            yield from _unusable_tensors(view, group, fused)
    yield from _rounded_scales(view)
    if view.model.layout is not None:
        yield from _unquantized(view, view.model.layout)


def _quantized(
    view: CheckpointView, group: ConfigGroup, fused: FusedLayer, correct_projections: frozenset[str]
) -> Iterator[Finding]:
    """Yield findings on the dtypes and shapes of quantized tensors.

    If a tensor is too large, vLLM silently narrows it. The finding on this tensor is a warning,
    unless the size in the config is probably wrong.
    """
    dimension = _narrowed_dimension(view, fused)
    if group.storage.transposed and dimension is not None:
        dimension = 1 - dimension
    for layer in view.layers.members(fused):
        parameters, shape = layer.parameters, view.layers.shape_of(layer)
        expected = group.parameters(shape) if shape is not None else {}
        split = [
            parameter
            for parameter, form in expected.items()
            if form.along and parameter in parameters
        ]
        all_differ = all(parameters[each].shape != expected[each].shape for each in split)
        # If all tensors of a layer have another size than the config, and no layer with this name
        # has the config's size, the config is probably wrong.
        is_config_right = not all_differ or layer.name.rpartition(".")[2] in correct_projections
        whole_words = INT32_BITS % group.weights.num_bits == 0
        narrowing = whole_words and is_config_right
        for parameter in (name for name in expected if name in parameters):
            yield from _dtype(view, parameters[parameter], expected[parameter])
            yield from _shape(
                group, parameters[parameter], expected[parameter], dimension, narrowing=narrowing
            )


def _unusable_tensors(
    view: CheckpointView, group: ConfigGroup, fused: FusedLayer
) -> Iterator[Finding]:
    if view.quantization.method is None:
        return
    from vexport.checks.vllm.quant_methods.base import MethodGroup

    assert isinstance(group, MethodGroup)
    for module in fused.members:
        for problem in group.stored_as.unusable_tensors(
            group, view.model.modules[module], view.reader
        ):
            yield replace(problem, where=f"{module}.{problem.where}")


def _correct_projections(view: CheckpointView) -> frozenset[str]:
    """Return the projections (`down_proj`) that have the config's size in at least one layer.

    If a projection is larger than the config's size in every layer, the config is wrong. vLLM
    would then narrow all these layers to the wrong size.
    """
    return frozenset(
        name.rpartition(".")[2]
        for name, layer in view.layers.by_name.items()
        if (group := layer.group) is not None
        and view.layers.shape_of(layer) == group.shape(layer.parameters)
    )


def _narrowed_dimension(view: CheckpointView, fused: FusedLayer) -> int | None:
    """Return the dimension along which vLLM narrows a layer's tensors.

    Returns None if vLLM narrows no dimension and requires the exact shape.
    """
    if EXPERT.search(fused.members[0]):
        return None
    return SPLIT_DIMENSIONS.get(split_of(fused, view.model.names))


def _dtype(view: CheckpointView, tensor: TensorInfo, expected: Parameter) -> Iterator[Finding]:
    if tensor.dtype in expected.dtypes:
        return
    is_negligible = tensor.name.endswith(GLOBAL_SCALES) and is_rounding_negligible(
        view.reader, tensor
    )
    is_cast = is_negligible or is_lossless_cast(view.reader, tensor, expected.dtype)
    rule = rules.CAST if is_cast else rules.DTYPE
    yield Finding.at(rule, tensor.name, dtype=tensor.dtype, dtypes=sorted(expected.dtypes))


def _shape(
    group: ConfigGroup,
    tensor: TensorInfo,
    expected: Parameter,
    dimension: int | None,
    *,
    narrowing: bool,
) -> Iterator[Finding]:
    scalar = expected.shape == (1,) and tensor.shape == ()
    if tensor.shape == expected.shape or scalar:
        return
    size = f" {group.weights.group_size}" if group.weights.group_size else ""
    is_cut = (
        narrowing
        and dimension in expected.along
        and _is_narrowed(tensor.shape, expected.shape, dimension)
    )
    yield Finding.at(
        rules.CUT if is_cut else rules.SHAPE,
        tensor.name,
        shape=list(tensor.shape),
        expected=list(expected.shape),
        format=group.format,
        strategy=f"{group.weights.strategy}{size}",
    )


def _is_narrowed(stored: tuple[int, ...], expected: Shape, dimension: int | None) -> bool:
    """Return True if a tensor is too large only along the dimension that vLLM narrows.

    Source: parameter.py.
    """
    if dimension is None or len(stored) != len(expected):
        return False
    same = all(
        size == full
        for axis, (size, full) in enumerate(zip(stored, expected, strict=True))
        if axis != dimension
    )
    return same and stored[dimension] > (expected[dimension] or stored[dimension])


def _rounded_scales(view: CheckpointView) -> Iterator[Finding]:
    stored: dict[tuple[str, str], dict[str, list[str]]] = {}
    for kind, tensor in _scales(view):
        if tensor.dtype in FLOATING:
            stored.setdefault(kind, {}).setdefault(tensor.dtype, []).append(tensor.name)
    for (_, parameter), dtypes in stored.items():
        whole = dtypes.get("F32", [])
        for dtype in ("BF16", "F16"):
            few = dtypes.get(dtype, [])
            for name in few if len(few) < len(whole) else ():
                other = whole[0].rpartition(".")[0]
                yield Finding.at(
                    rules.ROUNDED_SCALE, name, dtype=dtype, parameter=parameter, other=other
                )


def _scales(view: CheckpointView) -> Iterator[tuple[tuple[str, str], TensorInfo]]:
    """Yield (kind, tensor) for each scale. Scales of a kind should have the same dtype.

    The kind is a pair of a config group and a parameter. All scales of the KV cache are one kind.
    """
    for layer in view.layers.by_name.values():
        if layer.group is not None:
            for parameter in COMPARED_SCALES:
                if parameter in layer.parameters:
                    yield (layer.group.name, parameter), layer.parameters[parameter]
    for name, tensor in view.index.tensors.items():
        if name.endswith(CACHE_SCALES):
            yield ("", "the KV cache's scale"), tensor


def _unquantized(view: CheckpointView, layout: ModelLayout) -> Iterator[Finding]:
    quantized = {module for fused in view.layers.quantized for module in fused.members}
    narrowed_dimensions: dict[str, int | None] = {}
    for fused in view.model.fused_layers:
        narrowed_dimensions.update(dict.fromkeys(fused.members, _narrowed_dimension(view, fused)))
    for module, shape in layout.modules.items():
        if module not in quantized:
            yield from _unquantized_tensor(
                view, f"{module}.weight", shape, narrowed_dimensions.get(module)
            )
    for name, shape in layout.parameters.items():
        yield from _unquantized_tensor(view, name, shape, None)


def _unquantized_tensor(
    view: CheckpointView, name: str, shape: Shape, dimension: int | None
) -> Iterator[Finding]:
    tensor = view.index.tensors.get(name)
    if tensor is None or JOINED.fullmatch(name):
        return
    if tensor.dtype not in FLOATING:
        yield Finding.at(rules.DTYPE, name, dtype=tensor.dtype, dtypes=sorted(FLOATING))
    elif _loses_in_bfloat16(view, tensor):
        yield Finding.at(rules.LOSS_IN_BFLOAT16, name)
    known = any(size is not None for size in shape)
    if known and not _has_shape(tensor, shape):
        is_cut = _is_narrowed(tensor.shape, shape, dimension)
        yield Finding.at(
            rules.CUT_MODEL_SHAPE if is_cut else rules.MODEL_SHAPE,
            name,
            shape=list(tensor.shape),
            expected=list(shape),
            model=view.model.class_name,
        )


def _has_shape(tensor: TensorInfo, shape: Shape) -> bool:
    """Return True if a tensor has the expected shape.

    The sides of stacked experts may be in any order.
    """
    if len(tensor.shape) == 3 and None not in shape and ".experts." in tensor.name:
        return sorted(tensor.shape) == sorted(size for size in shape if size is not None)
    sides = zip(shape, tensor.shape, strict=False)
    return len(tensor.shape) == len(shape) and all(known in (None, size) for known, size in sides)


def _loses_in_bfloat16(view: CheckpointView, tensor: TensorInfo) -> bool:
    """Return True if a float16 tensor of a bfloat16 model loses precision in bfloat16.

    The model counts as bfloat16 if its config has this dtype and it stores other tensors in it.
    """
    config, tensors = view.index.config, view.index.tensors.values()
    if tensor.dtype != "F16" or config.get("dtype", config.get("torch_dtype")) != "bfloat16":
        return False
    if all(other.dtype != "BF16" for other in tensors):
        return False
    values = view.reader.floats(tensor)
    return not np.array_equal(values, rounded(values, "BF16"))


def _compare_widths(
    view: CheckpointView, group: ConfigGroup, fused: FusedLayer
) -> Iterator[Finding]:
    shapes = {layer.name: view.layers.shape_of(layer) for layer in view.layers.members(fused)}
    widths = {name: shape[1] for name, shape in shapes.items() if shape}
    if len(set(widths.values())) > 1:
        sizes = [f"{module.rpartition('.')[2]} {width}" for module, width in widths.items()]
        yield Finding.at(rules.FUSED_WIDTHS, fused.name, widths=sizes)
    size = group.weights.group_size
    for module, width in widths.items():
        if size and size > 0 and width % size:
            yield Finding.at(rules.GROUP_SIZE, module, width=width, size=size)


def _whole_blocks(view: CheckpointView, group: ConfigGroup, fused: FusedLayer) -> Iterator[Finding]:
    members = (
        view.layers.members_with_sizes(fused, group) if group.weights.block is not None else None
    )
    if members is None:
        return
    parts = parts_of(fused, members, view.model.names)
    if reason := group.storage.unsupported_shape(group, partition_of(parts, 1, "none")):
        yield Finding.at(rules.BLOCKS, fused.name, reason=reason)
