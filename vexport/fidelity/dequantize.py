"""A layer's weight as vLLM would use it, by compressed-tensors' own code, for any producer's checkpoint."""

from collections.abc import Mapping

import torch

from vexport.checkpoint.tensors import TORCH_DTYPES, read_tensor
from vexport.checks.vllm.layers import Layer, layers_of
from vexport.checks.vllm.view import CheckpointView, ConfigGroup
from vexport.formats.base import Format, Parameter
from vexport.types import TensorInfo


def dequantized(view: CheckpointView, layer: str) -> torch.Tensor | None:
    """A layer's weight; None where its tensors are not those of its config group, or not finite."""
    found = layers_of(view).get(layer)
    if found is None or found.group is None or not is_readable(found.group, found.parameters):
        return None
    try:
        weight = weight_of(found.group, read_parameters(view, found.parameters))
    except ValueError:
        return None
    finally:
        view.reader.release(found.parameters.values())
    return weight if bool(torch.isfinite(weight).all()) else None


def is_readable(group: ConfigGroup, parameters: Mapping[str, TensorInfo]) -> bool:
    """Whether a layer has all tensors of its config group, in dtypes that hold what they should."""
    expected = group.expected(parameters)
    if expected is None or not expected.keys() <= parameters.keys():
        return False
    return all(parameters[parameter].dtype in expected[parameter].dtypes for parameter in expected)


def read_parameters(view: CheckpointView, tensors: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
    """The values of a layer's tensors by their name within it."""
    return {parameter: read_tensor(view.reader, tensor) for parameter, tensor in tensors.items()}


def as_loaded(view: CheckpointView, layer: Layer) -> dict[str, torch.Tensor] | None:
    """The tensors that a layer's weight is made of, as vLLM's parameters hold them.

    What is stored in another dtype is cast by value, of what is too large the beginning is taken, and
    `weight_shape`, which vLLM does not read, is that of the weight. None where the config group is none of
    vLLM's schemes, or a tensor is missing or too small.
    """
    group, parameters = layer.group, layer.parameters
    shape = view.linear_shape(group, layer.name, parameters) if group is not None else None
    if group is None or shape is None or group.refusal is not None:
        return None
    found = {}
    for parameter, form in group.parameters(shape).items():
        tensor = parameters.get(parameter)
        if parameter == "weight_shape":
            found[parameter] = torch.tensor(shape)
        elif parameter.startswith("weight"):
            if tensor is None or not _fills(tensor, form):
                return None
            value = read_tensor(view.reader, tensor)
            value = value[tuple(slice(side) for side in form.shape)] if value.ndim else value
            kept = tensor.dtype in form.dtypes
            found[parameter] = value if kept else value.to(TORCH_DTYPES[form.dtype])
    return found


def _fills(tensor: TensorInfo, form: Parameter) -> bool:
    """Whether a tensor has a number for each of a parameter, at its place."""
    if tensor.dtype not in TORCH_DTYPES:
        return False
    if not tensor.shape:
        return all(side == 1 for side in form.shape)
    sizes = zip(tensor.shape, form.shape, strict=False)
    return len(tensor.shape) == len(form.shape) and all(stored >= side for stored, side in sizes)


def weight_of(group: ConfigGroup, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The weight that compressed-tensors makes of a layer's tensors; ValueError where vLLM has no scheme."""
    stored = {parameter: value for parameter, value in parameters.items() if parameter.startswith("weight")}
    return vllm_storage(group).dequantize(group, stored)


def vllm_storage(group: ConfigGroup) -> Format:
    """The format as which vLLM reads a group; ValueError where it has no scheme."""
    if group.refusal is not None:
        raise ValueError(group.refusal)
    return group.storage
