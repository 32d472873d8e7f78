"""Are dtypes and shapes those of the config group, and of the model's config?"""

from collections.abc import Iterator

import numpy as np

from vexport.checkpoint.dtypes import FLOATING
from vexport.checks.tensors.casts import rounded, survives
from vexport.checks.vllm.arguments import ConfigGroup
from vexport.checks.vllm.decoder import Layout
from vexport.checks.vllm.expected import INT32_BITS, Expected, layer_sides, parameters_of
from vexport.checks.vllm.subject import Subject, Unit, error, warning
from vexport.schemes import fp8
from vexport.schemes.base import EXPERT, SchemeArgs, Share, is_head
from vexport.types import Finding, TensorInfo

NAME = "shapes"
DESCRIPTION = "dtypes and shapes are those that the config announces, and fused layers fit together"

# Rounded to 16 bits it moves all weights of a layer alike, by .4 % at most: far less than FP4 does.
GLOBAL_SCALE, SIXTEEN_BITS = ".weight_global_scale", ("F16", "BF16")
LAYER_SCALES = frozenset({"weight_scale", "input_scale"})
CACHE_SCALES = (".k_scale", ".v_scale")


def run(subject: Subject) -> Iterator[Finding]:
    """Findings on tensors that vLLM would refuse, narrow or cast."""
    right = _right_somewhere(subject)
    for unit in subject.units:
        group = subject.group_of(unit)
        if group is not None and unit.is_quantized:
            yield from _fit_together(subject, group, unit)
            yield from _whole_blocks(subject, group, unit)
            yield from _quantized(subject, group, unit, right)
    yield from _rounded_scales(subject)
    if subject.layout is not None:
        yield from _unquantized(subject, subject.layout)


def _quantized(subject: Subject, group: ConfigGroup, unit: Unit, right: frozenset[str]) -> Iterator[Finding]:
    cut = _cut(subject, unit)
    for module, leaves in unit.members.items():
        sides = subject.sides(group, module, leaves)
        expected = parameters_of(group, *sides) if sides is not None else {}
        parts = [leaf for leaf, parameter in expected.items() if parameter.along and leaf in leaves]
        whole = all(leaves[leaf].shape != expected[leaf].shape for leaf in parts)
        dense = INT32_BITS % group.weights.num_bits == 0
        narrowing = dense and (not whole or module.rpartition(".")[2] in right)
        for leaf in expected.keys() & leaves.keys():
            yield from _dtype(subject, group, leaves[leaf], expected[leaf])
            yield from _shape(group, leaves[leaf], expected[leaf], cut, narrowing=narrowing)


def _right_somewhere(subject: Subject) -> frozenset[str]:
    """The last names of layers of which at least one is as large as the model's config says.

    Where all are larger the config is at fault, and vLLM would cut the model down to it.
    """
    return frozenset(
        module.rpartition(".")[2]
        for unit in subject.units
        if (group := subject.group_of(unit)) is not None
        for module, leaves in unit.members.items()
        if subject.sides(group, module, leaves) == layer_sides(group, leaves)
    )


def _cut(subject: Subject, unit: Unit) -> int | None:
    """The dimension along which vLLM narrows what it loads for a layer, None where it compares shapes."""
    leaf = unit.name.rpartition(".")[2]
    if EXPERT.search(next(iter(unit.members))) or is_head(unit.name):
        return None
    if leaf in subject.architecture.row_parallel:
        return 1
    return None if leaf in subject.architecture.replicated else 0


def _dtype(subject: Subject, group: ConfigGroup, tensor: TensorInfo, expected: Expected) -> Iterator[Finding]:
    if tensor.dtype in expected.dtypes:
        return
    wanted = f"dtype {' or '.join(sorted(expected.dtypes))} ({group.format})"
    rounded_little = tensor.name.endswith(GLOBAL_SCALE) and tensor.dtype in SIXTEEN_BITS
    if rounded_little or survives(subject.reader, tensor, expected.dtype):
        yield warning(
            NAME,
            tensor.name,
            expected=wanted,
            got=f"{tensor.dtype}, whose values vLLM casts without a loss",
            fix="export it again, or `vexport repair`",
        )
        return
    yield error(
        NAME,
        tensor.name,
        expected=wanted,
        got=tensor.dtype,
        fix="export it again: vLLM would cast the values silently",
    )


def _shape(
    group: ConfigGroup, tensor: TensorInfo, expected: Expected, cut: int | None, *, narrowing: bool
) -> Iterator[Finding]:
    scalar = expected.shape == (1,) and tensor.shape == ()
    if tensor.shape == expected.shape or scalar:
        return
    wanted = f"shape {list(expected.shape)} ({group.format}, {_granularity(group)})"
    if narrowing and cut in expected.along and _is_narrowed(tensor.shape, expected.shape, cut):
        yield warning(
            NAME,
            tensor.name,
            expected=wanted,
            got=f"{list(tensor.shape)}, of which vLLM silently drops the end",
            fix="export it again",
        )
        return
    yield error(
        NAME,
        tensor.name,
        expected=wanted,
        got=str(list(tensor.shape)),
        fix="export it again, or correct the config",
    )


def _is_narrowed(stored: tuple[int, ...], expected: tuple[int, ...], cut: int | None) -> bool:
    """Whether a tensor only has too much along the dimension that vLLM cuts (parameter.py)."""
    if cut is None or len(stored) != len(expected):
        return False
    same = all(
        one == other for place, (one, other) in enumerate(zip(stored, expected, strict=True)) if place != cut
    )
    return same and stored[cut] > expected[cut]


def _rounded_scales(subject: Subject) -> Iterator[Finding]:
    """Scales of fewer bits than the same scales of other layers: somebody has rounded them."""
    stored: dict[tuple[str, str], dict[str, list[str]]] = {}
    for kind, tensor in _scales(subject):
        if tensor.dtype in FLOATING:
            stored.setdefault(kind, {}).setdefault(tensor.dtype, []).append(tensor.name)
    for (_, leaf), dtypes in stored.items():
        whole = dtypes.get("F32", [])
        for dtype in ("BF16", "F16"):
            few = dtypes.get(dtype, [])
            for name in few if len(few) < len(whole) else ():
                yield error(
                    NAME,
                    name,
                    expected=f"dtype F32, as {leaf} of {whole[0].rpartition('.')[0]} has",
                    got=f"{dtype}, which has fewer digits",
                    fix="export it again",
                )


def _scales(subject: Subject) -> Iterator[tuple[tuple[str, str], TensorInfo]]:
    """All scales, by what should be stored alike: config group and parameter, or the KV cache."""
    for unit in subject.units:
        group = subject.group_of(unit)
        if group is None:
            continue
        for leaves in unit.members.values():
            yield from (((group.name, leaf), leaves[leaf]) for leaf in LAYER_SCALES & leaves.keys())
    for name, tensor in subject.index.tensors.items():
        if name.endswith(CACHE_SCALES):
            yield ("", "the KV cache's scale"), tensor


def _unquantized(subject: Subject, layout: Layout) -> Iterator[Finding]:
    """Norms, biases, embeddings and layers that are not quantized, by the model's config."""
    quantized = {module for unit in subject.units if unit.is_quantized for module in unit.members}
    for unit in subject.units:
        cut = _cut(subject, unit)
        for module in unit.members.keys() & layout.linears.keys() - quantized:
            expected = Expected(dtypes=FLOATING, shape=layout.linears[module], along=(0, 1))
            yield from _plain(subject, f"{module}.weight", expected, cut)
    for module, shape in layout.tables.items():
        if module not in quantized:
            yield from _plain(subject, f"{module}.weight", Expected(dtypes=FLOATING, shape=shape), None)
    for name, sides in layout.parameters.items():
        yield from _plain(subject, name, Expected(dtypes=FLOATING, shape=sides), None)


def _plain(subject: Subject, name: str, expected: Expected, cut: int | None) -> Iterator[Finding]:
    tensor = subject.index.tensors.get(name)
    if tensor is None:
        return
    if tensor.dtype not in FLOATING:
        yield error(
            NAME,
            name,
            expected=f"dtype {' or '.join(sorted(FLOATING))}",
            got=tensor.dtype,
            fix="export it again: vLLM would cast the values silently",
        )
    elif _loses_in_bfloat16(subject, tensor):
        yield error(
            NAME,
            name,
            expected="dtype BF16, as the model has",
            got="F16 with digits that BF16 does not hold: vLLM drops them, or its bits are no F16",
            fix="export it again",
        )
    if tensor.shape != expected.shape:
        narrowed = cut in expected.along and _is_narrowed(tensor.shape, expected.shape, cut)
        yield error(
            NAME,
            name,
            expected=f"shape {list(expected.shape)}, as config.json sizes {subject.class_name}",
            got=f"{list(tensor.shape)}{', of which vLLM silently drops the end' if narrowed else ''}",
            fix="export it again, or correct config.json",
        )


def _loses_in_bfloat16(subject: Subject, tensor: TensorInfo) -> bool:
    """Whether a tensor of float16 stands alone in a model of bfloat16 and does not fit into it."""
    config, tensors = subject.index.config, subject.index.tensors.values()
    if tensor.dtype != "F16" or config.get("dtype", config.get("torch_dtype")) != "bfloat16":
        return False
    if all(other.dtype != "BF16" for other in tensors):
        return False
    values = subject.reader.floats(tensor)
    return not np.array_equal(values, rounded(values, "BF16"))


def _fit_together(subject: Subject, group: ConfigGroup, unit: Unit) -> Iterator[Finding]:
    widths = {
        module: sides[1]
        for module, leaves in unit.members.items()
        if (sides := subject.sides(group, module, leaves))
    }
    if len(set(widths.values())) > 1:
        yield error(
            NAME,
            unit.name,
            expected="the same in_features in all layers that run as one",
            got=", ".join(f"{module.rpartition('.')[2]} {width}" for module, width in widths.items()),
            fix="export the checkpoint again",
        )
    size = group.weights.group_size
    for module, width in widths.items():
        if size and size > 0 and width % size:
            yield error(
                NAME,
                module,
                expected=f"in_features that are a multiple of group_size {size}",
                got=str(width),
                fix="quantize the layer with another group size, or keep it",
            )


def _whole_blocks(subject: Subject, group: ConfigGroup, unit: Unit) -> Iterator[Finding]:
    """What vLLM refuses at every tensor parallel size."""
    sides = [
        found for module, leaves in unit.members.items() if (found := subject.sides(group, module, leaves))
    ]
    if group.weights.strategy != "block" or not group.weights.block_structure or not sides:
        return
    args = SchemeArgs(weights=group.weights, input_activations=group.input_activations)
    rows = tuple(side[0] for side in sides)
    share = Share(
        out_features=rows,
        in_features=sides[0][1],
        experts=EXPERT.search(next(iter(unit.members))) is not None,
        head=is_head(unit.name),
    )
    misfit = fp8.FAMILY.misfit(args, share)
    if misfit:
        yield error(
            NAME,
            unit.name,
            expected="whole blocks in layers that vLLM runs as one, but for the last",
            got=misfit,
            fix="quantize the layer per channel, or keep it",
        )


def _granularity(group: ConfigGroup) -> str:
    size = group.weights.group_size
    return f"{group.weights.strategy} {size}" if size else group.weights.strategy
