"""Tensors that hold the right numbers in another dtype or shape, or that can be told from the others."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from vexport.checkpoint.tensors import TORCH_DTYPES, read_tensor
from vexport.checks.vllm.layers import Layer, layers_of
from vexport.checks.vllm.view import QUANTIZED_PARAMETERS, CheckpointView, ConfigGroup
from vexport.fidelity.source import Source
from vexport.formats.base import Parameter
from vexport.repair.changes import LOSSLESS, Changes, Edit, Repair
from vexport.types import TensorInfo, TensorSpec

NAME = "layout"
E8M0 = "F8_E8M0"
PREFERRED = ("F32", "F8_E4M3", "I8", "U8", "I32", "I64")
INPUTS = frozenset({"input_scale", "input_zero_point", "input_global_scale"})


def run(view: CheckpointView, source: Source | None) -> Changes:
    """Corrected tensors, and the names of those that go."""
    edits: list[Edit] = []
    repairs: list[Repair] = []
    dropped: set[str] = set()
    for layer in layers_of(view).values():
        if layer.group is None or not layer.is_quantized:
            continue
        expected = layer.group.expected(layer.parameters)
        for edit, repair in _corrected(view, layer, expected or {}):
            edits.append(edit)
            repairs.append(repair)
        for tensor, repair in _leftover(view, layer, layer.group, expected):
            dropped.add(tensor.name)
            repairs.append(repair)
    return Changes(edits=tuple(edits), repairs=tuple(repairs), dropped=frozenset(dropped))


def _corrected(
    view: CheckpointView, layer: Layer, expected: Mapping[str, Parameter]
) -> Iterator[tuple[Edit, Repair]]:
    for parameter, form in expected.items():
        tensor = layer.parameters.get(parameter)
        if tensor is None:
            if parameter == "weight_shape":
                yield _weight_shape(layer)
            continue
        spec = _target(view, tensor, form)
        if spec is not None:
            now = f"{spec.dtype} {list(spec.shape)}"
            edit = Edit(tensors=(spec,), near=tensor.name, make=partial(_converted, view, tensor, spec))
            yield edit, _repair(tensor.name, f"{tensor.dtype} {list(tensor.shape)}", now)


def _target(view: CheckpointView, tensor: TensorInfo, expected: Parameter) -> TensorSpec | None:
    """The dtype and shape that a tensor should have; None where it has them or would lose values."""
    dtype, shape = tensor.dtype, tensor.shape
    if dtype not in expected.dtypes:
        dtype = next(name for name in PREFERRED if name in expected.dtypes)
    if shape not in (expected.shape, ()) and _squeezed(shape) == _squeezed(expected.shape):
        shape = expected.shape
    spec = TensorSpec(name=tensor.name, dtype=dtype, shape=shape)
    if (dtype, shape) == (tensor.dtype, tensor.shape):
        return None
    if dtype == tensor.dtype or _is_exact(read_tensor(view.reader, tensor), tensor.dtype, dtype):
        return spec
    return None


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(side for side in shape if side != 1)


def _is_exact(values: torch.Tensor, old: str, new: str) -> bool:
    """Whether the values survive; e8m0 exponents become the bytes that they are."""
    if old == E8M0:
        return new == "U8"
    exact = values.to(torch.float64)
    return bool(torch.equal(exact, exact.to(TORCH_DTYPES[new]).to(torch.float64)))


def _converted(view: CheckpointView, tensor: TensorInfo, spec: TensorSpec) -> Mapping[str, torch.Tensor]:
    values = read_tensor(view.reader, tensor)
    dtype = TORCH_DTYPES[spec.dtype]
    if tensor.dtype == E8M0:
        values = values.view(dtype)
    elif tensor.dtype != spec.dtype:
        values = values.to(torch.float64).to(dtype)
    return {spec.name: values.reshape(spec.shape)}


def _weight_shape(layer: Layer) -> tuple[Edit, Repair]:
    assert layer.group is not None
    shape = layer.group.shape(layer.parameters)
    assert shape is not None
    spec = TensorSpec(name=f"{layer.name}.weight_shape", dtype="I64", shape=(2,))
    edit = Edit(
        tensors=(spec,),
        near=layer.parameters["weight_packed"].name,
        make=lambda: {spec.name: torch.tensor(shape, dtype=torch.int64)},
    )
    return edit, _repair(spec.name, "no such tensor", f"[{shape[0]}, {shape[1]}], from the other tensors")


def _leftover(
    view: CheckpointView, layer: Layer, group: ConfigGroup, expected: Mapping[str, Parameter] | None
) -> Iterator[tuple[TensorInfo, Repair]]:
    """Tensors that the scheme does not have and that change nothing."""
    if expected is None:
        return
    for parameter in sorted((layer.parameters.keys() & QUANTIZED_PARAMETERS) - expected.keys()):
        tensor = layer.parameters[parameter]
        unread = IDLE.get(parameter)
        if parameter in INPUTS or unread is not None and unread(read_tensor(view.reader, tensor), group):
            yield tensor, _repair(tensor.name, "a tensor that the layer's scheme does not have", "removed")


def _is_zero(values: torch.Tensor, group: ConfigGroup) -> bool:
    return not bool(values.to(torch.float64).any())


def is_in_order(g_idx: torch.Tensor, group: ConfigGroup) -> bool:
    """Whether activation ordering left all columns in their groups; -1 says that too."""
    if bool((g_idx == -1).all()):
        return True
    size = group.weights.group_size
    return bool(size) and torch.equal(g_idx.to(torch.int64), torch.arange(len(g_idx)) // (size or 1))


IDLE: Mapping[str, Callable[[torch.Tensor, ConfigGroup], bool]] = {
    "weight_zero_point": _is_zero,
    "weight_g_idx": is_in_order,
}


def _repair(where: str, got: str, now: str) -> Repair:
    return Repair(family=NAME, where=where, got=got, now=now, cost=LOSSLESS)
