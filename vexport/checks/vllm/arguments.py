"""Config groups as compressed-tensors reads them, or why it refuses them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from vexport.formats import nearest_format, vllm_format
from vexport.formats.arguments import QuantArgs
from vexport.formats.base import Format, Parameter
from vexport.formats.parsing import parse_args
from vexport.types import Json, TensorInfo


@dataclass(frozen=True, kw_only=True)
class ConfigGroup:
    """One entry of config_groups: which layers, and how their weights and inputs are quantized."""

    name: str
    targets: tuple[str, ...]
    weights: QuantArgs
    input_activations: QuantArgs | None
    format: str

    @cached_property
    def storage(self) -> Format:
        """How its layers are stored; where vLLM refuses the group, the format that comes closest."""
        return nearest_format(self, self.format)

    @cached_property
    def refusal(self) -> str | None:
        """Why vLLM refuses the group, or None."""
        found = vllm_format(self, self.format)
        return found if isinstance(found, str) else None

    def parameters(self, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """The tensors of a layer (out_features, in_features) by their names within it."""
        return self.storage.parameters(self, shape)

    def shape(self, tensors: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
        """(out_features, in_features) of a layer by its stored tensors; None where that cannot be told."""
        return self.storage.shape(self, tensors)

    def expected(self, tensors: Mapping[str, TensorInfo]) -> Mapping[str, Parameter] | None:
        """The parameters of a layer with these tensors; None where its shape cannot be told."""
        shape = self.shape(tensors)
        return None if shape is None else self.parameters(shape)


def parse_group(name: str, raw: Json, default_format: str) -> ConfigGroup | str:
    """A config group, or the reason why it cannot be read."""
    if not isinstance(raw, dict):
        return "no JSON object"
    targets = raw.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        return "no list of targets"
    weights = parse_args(raw.get("weights"))
    inputs = parse_args(raw.get("input_activations")) if raw.get("input_activations") else None
    if isinstance(weights, str):
        return f"weights: {weights}"
    if isinstance(inputs, str):
        return f"input_activations: {inputs}"
    return ConfigGroup(
        name=name,
        targets=tuple(str(target) for target in targets),
        weights=weights,
        input_activations=inputs,
        format=str(raw.get("format") or default_format),
    )


def of_attention(raw: Json) -> bool:
    """Whether vLLM passes over a group: it quantizes attention by the KV cache's scheme (`from_config`)."""
    targets = raw.get("targets") if isinstance(raw, dict) else None
    return isinstance(targets, list) and len(targets) == 1 and str(targets[0]).endswith("Attention")
