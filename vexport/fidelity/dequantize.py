"""Dequantize weights as vLLM uses them, with compressed-tensors, and measure the error."""

from collections.abc import Callable, Iterator, Mapping

import torch

from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader, same_bytes
from vexport.checkpoint.smoothed import source_reader
from vexport.checkpoint.tensors import TORCH_DTYPES, read_tensor, read_weight
from vexport.checks.vllm.groups import ConfigGroup, StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.formats.base import Format, Parameter
from vexport.formats.dequantize import row_chunks, rows_of
from vexport.formats.plan import FusionGroup, Plan
from vexport.numerics.metrics import ErrorPower, quantization_error
from vexport.records import Finding, LayerError, LinearPlan, TensorInfo
from vexport.rules import roundtrip


def dequantized(view: CheckpointView, layer: str) -> torch.Tensor | None:
    """Return a layer's weight, or None if its tensors do not fit its group or are not finite."""
    stored = view.layers.by_name.get(layer)
    values = as_loaded(view, stored) if stored is not None else None
    if stored is None or stored.group is None or values is None:
        return None
    try:
        weight = weight_of(stored.group, values)
    except ValueError:
        return None
    finally:
        view.reader.release(stored.parameters.values())
    return weight if bool(torch.isfinite(weight).all()) else None


def read_parameters(
    view: CheckpointView, tensors: Mapping[str, TensorInfo]
) -> dict[str, torch.Tensor]:
    """Return the values of a layer's tensors, by parameter name (`weight_scale`)."""
    return {parameter: read_tensor(view.reader, tensor) for parameter, tensor in tensors.items()}


def as_loaded(view: CheckpointView, layer: StoredLayer) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a layer's weight after vLLM has copied them to its parameters.

    Tensors with another dtype are cast by value. Tensors that are too large are cut off.
    `weight_shape` is replaced by the weight's shape, because vLLM does not read it. Returns None if
    vLLM has no scheme for the config group, or if a tensor is missing or too small.
    """
    group, parameters = layer.group, layer.parameters
    shape = view.layers.shape_of(layer)
    if group is None or shape is None or group.refusal is not None:
        return None
    stored = {}
    for parameter, form in group.parameters(shape).items():
        tensor = parameters.get(parameter)
        if parameter == "weight_shape":
            stored[parameter] = torch.tensor(shape)
        elif parameter.startswith("weight"):
            if tensor is None or not _fills_parameter(tensor, form):
                return None
            value = read_tensor(view.reader, tensor)
            value = value[tuple(slice(side) for side in form.shape)] if value.ndim else value
            kept = tensor.dtype in form.dtypes
            stored[parameter] = value if kept else value.to(TORCH_DTYPES[form.dtype])
    return stored


def _fills_parameter(tensor: TensorInfo, form: Parameter) -> bool:
    if tensor.dtype not in TORCH_DTYPES:
        return False
    if not tensor.shape:
        return all(side == 1 for side in form.shape)
    sizes = zip(tensor.shape, form.shape, strict=False)
    return len(tensor.shape) == len(form.shape) and all(stored >= side for stored, side in sizes)


def weight_of(group: ConfigGroup, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the weight that compressed-tensors computes from a layer's tensors.

    Raises ValueError if vLLM has no scheme for the group.
    """
    stored = {
        parameter: value
        for parameter, value in parameters.items()
        if parameter.startswith("weight")
    }
    return vllm_storage(group).dequantize(group, stored)


def vllm_storage(group: ConfigGroup) -> Format:
    """Return the format in which vLLM reads a group.

    Raises ValueError if vLLM has no scheme for the group.
    """
    if group.refusal is not None:
        raise ValueError(group.refusal)
    return group.storage


def layer_errors(
    source: SourceIndex,
    written: SourceIndex,
    plan: Plan,
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[LayerError, ...]:
    """Return the signal-to-noise ratio of every quantized weight, in the order of the plan.

    Weights are dequantized a few rows at a time.
    """
    total = sum(len(group.members) for group in plan.groups)
    errors: list[LayerError] = []
    with source_reader(written.root) as old, Reader() as new:
        for group in plan.groups:
            for member in group.members:
                snr_db = _layer_error(source, written, group, member, old, new)
                errors.append(LayerError(name=member.name, scheme=group.scheme.name, snr_db=snr_db))
                on_layer(len(errors), total)
    return tuple(errors)


def _layer_error(
    source: SourceIndex,
    written: SourceIndex,
    group: FusionGroup,
    member: LinearPlan,
    old: Reader,
    new: Reader,
) -> float:
    """Return the signal-to-noise ratio of a layer's weight in dB."""
    scheme = group.scheme
    tensor = source.tensors[member.weight]
    weight = read_weight(old, tensor, member.part)
    tensors = [written.tensors[spec.name] for spec in scheme.layout(member, tensor.dtype)]
    stored = {info.name.rpartition(".")[2]: read_tensor(new, info) for info in tensors}
    power = ErrorPower()
    for rows in row_chunks(member.out_features, member.in_features):
        back = scheme.format.dequantize(scheme.args, rows_of(stored, scheme.args.weights, rows))
        power += quantization_error(weight[rows], back)
    old.release([tensor])
    new.release(tensors)
    return power.sqnr_db


def changed_tensors(source: SourceIndex, written: SourceIndex, plan: Plan) -> Iterator[Finding]:
    """Yield an error for every unquantized tensor with other bytes than in the source."""
    with source_reader(written.root) as old, Reader() as new:
        for name in plan.kept:
            tensor, copy = source.tensors[name], written.tensors.get(name)
            if copy is None or not same_bytes(old, tensor, new, copy):
                yield Finding.at(roundtrip.CHANGED_TENSOR, name)
