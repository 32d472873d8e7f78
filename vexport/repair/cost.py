"""What a mend costs: a layer's weight before and after, dequantized by compressed-tensors' own code."""

from collections.abc import Mapping
from functools import cache

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from pydantic import TypeAdapter

from vexport.checks.expected import expected_parameters
from vexport.checks.subject import ConfigGroup, Subject
from vexport.noise import noise_of
from vexport.repair.mends import WeightChange
from vexport.repair.overlay import leaves_of
from vexport.repair.source import Source
from vexport.repair.units import layers_of
from vexport.roundtrip import decompress
from vexport.schemes.base import QuantArgs


def weight_change(before: Subject, after: Subject, layer: str, source: Source | None) -> WeightChange | None:
    """How far the weight of a layer moved; None where it cannot be dequantized afterwards."""
    old, new = dequantized(before, layer), dequantized(after, layer)
    if new is None:
        return None
    exact = source.weight(layer) if source else None
    against = None
    if exact is not None and exact.shape == new.shape:
        against = (None if old is None else noise_of(exact, old).decibels, noise_of(exact, new).decibels)
    moved = noise_of(old, new) if old is not None and old.shape == new.shape else None
    return WeightChange(
        relative=moved.relative if moved else None,
        snr_db=moved.decibels if moved else None,
        source_snr_db=against,
    )


def dequantized(subject: Subject, layer: str) -> torch.Tensor | None:
    """A layer's weight; None where its tensors are not those of its config group, or not finite."""
    found = layers_of(subject).get(layer)
    if found is None or found.group is None:
        return None
    expected = expected_parameters(found.group, found.leaves)
    if expected is None or not expected.keys() <= found.leaves.keys():
        return None
    if any(found.leaves[leaf].dtype not in expected[leaf].dtypes for leaf in expected):
        return None
    try:
        weight = weight_of(found.group, leaves_of(subject, found.leaves))
    except ValueError:
        return None
    finally:
        subject.reader.release(found.leaves.values())
    return weight if bool(torch.isfinite(weight).all()) else None


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
