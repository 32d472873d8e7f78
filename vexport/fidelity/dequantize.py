"""A layer's weight as vLLM would use it, by compressed-tensors' own code, for any producer's checkpoint."""

from collections.abc import Mapping
from functools import cache

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from pydantic import TypeAdapter

from vexport.checkpoint.tensors import read_tensor
from vexport.checks.expected import expected_parameters
from vexport.checks.layers import layers_of
from vexport.checks.subject import ConfigGroup, Subject
from vexport.roundtrip import decompress
from vexport.schemes.base import QuantArgs
from vexport.types import TensorInfo


def dequantized(subject: Subject, layer: str) -> torch.Tensor | None:
    """A layer's weight; None where its tensors are not those of its config group, or not finite."""
    found = layers_of(subject).get(layer)
    if found is None or found.group is None or not is_readable(found.group, found.leaves):
        return None
    try:
        weight = weight_of(found.group, leaves_of(subject, found.leaves))
    except ValueError:
        return None
    finally:
        subject.reader.release(found.leaves.values())
    return weight if bool(torch.isfinite(weight).all()) else None


def is_readable(group: ConfigGroup, leaves: Mapping[str, TensorInfo]) -> bool:
    """Whether a layer has all tensors of its config group, in dtypes that hold what they should."""
    expected = expected_parameters(group, leaves)
    if expected is None or not expected.keys() <= leaves.keys():
        return False
    return all(leaves[leaf].dtype in expected[leaf].dtypes for leaf in expected)


def leaves_of(subject: Subject, tensors: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
    """The values of a layer's tensors by their name within it."""
    return {leaf: read_tensor(subject.reader, tensor) for leaf, tensor in tensors.items()}


def weight_of(group: ConfigGroup, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The weight that compressed-tensors makes of a layer's tensors."""
    stored = {leaf: value for leaf, value in leaves.items() if leaf != "bias"}
    return decompress(ct_scheme(group), group.format, stored)


def ct_scheme(group: ConfigGroup) -> QuantizationScheme:
    """A config group as compressed-tensors' own model."""
    inputs = group.input_activations
    return _scheme(_dumped(group.weights), _dumped(inputs) if inputs else None)


def _dumped(args: QuantArgs) -> str:
    return TypeAdapter(QuantArgs).dump_json(args).decode()


@cache
def _scheme(weights: str, inputs: str | None) -> QuantizationScheme:
    return QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs.model_validate_json(weights),
        input_activations=QuantizationArgs.model_validate_json(inputs) if inputs else None,
    )
