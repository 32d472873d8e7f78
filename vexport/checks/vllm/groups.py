"""Config groups and online rotations of a quantization config, and how vLLM matches layers.

Sources for groups: `_quantization_scheme_map_from_config` and `get_scheme_dict` in vLLM's
compressed_tensors.py, `find_matched_target` and `should_ignore_layer` in
compressed_tensors/utils.py, `find_matching_patterns` in quantization/utils/config_utils.py,
`get_moe_method` in compressed_tensors_moe.py.

Sources for rotations that a running model computes: get_linear_transform_schemes and
CompressedTensorsLinearTransformMethod in vLLM's transform/linear.py. All other rotations are merged
into the weights.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from vexport.architectures import Architecture
from vexport.architectures.fusion import FusedLayer, is_head, moe_layer
from vexport.architectures.stored import QUANTIZED_PARAMETERS
from vexport.formats import nearest_format, vllm_format
from vexport.formats.arguments import QuantArgs, SchemeArgs, parse_args
from vexport.formats.base import Format, Parameter
from vexport.records import Json, TensorInfo
from vexport.records.patterns import REGEX, Patterns, matches

HEAD_CLASS = "ParallelLMHead"
EMBEDDING_CLASS = "VocabParallelEmbedding"
EXPERTS_CLASS = "RoutedExperts"
# This target also matches routed experts, but only in exactly this spelling
# (_add_fused_moe_to_target_scheme_map).
LINEAR = "Linear"
EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.[^.]+$)")
INPUT, OUTPUT = "input", "output"
# Locations of rotations that are merged into the weights.
MERGED_LOCATIONS = ("weight_input", "weight_output")


@dataclass(frozen=True, kw_only=True)
class ConfigGroup:
    """Entry of config_groups: its targets, and how weights and inputs are quantized."""

    name: str
    targets: tuple[str, ...]
    weights: QuantArgs
    input_activations: QuantArgs | None
    format: str

    @property
    def args(self) -> SchemeArgs:
        """Quantization of the layers, without the group's name, targets and format."""
        return SchemeArgs(weights=self.weights, input_activations=self.input_activations)

    @cached_property
    def storage(self) -> Format:
        """Storage format of the layers, or the nearest format if vLLM refuses the group."""
        return nearest_format(self, self.format)

    @cached_property
    def refusal(self) -> str | None:
        """Reason why vLLM refuses the group, or None if vLLM runs it."""
        layout = vllm_format(self, self.format)
        return layout if isinstance(layout, str) else None

    def parameters(self, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """Return the tensors of a layer with the shape (out_features, in_features)."""
        return self.storage.parameters(self, shape)

    def shape(self, tensors: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
        """Return (out_features, in_features) of a layer from its tensors, or None if unknown."""
        return self.storage.shape(self, tensors)

    def expected(self, tensors: Mapping[str, TensorInfo]) -> Mapping[str, Parameter] | None:
        """Return the tensors that a layer should have, or None if its size is unknown.

        The size is derived from the layer's stored tensors.
        """
        shape = self.shape(tensors)
        return None if shape is None else self.parameters(shape)


Targets = Mapping[str, ConfigGroup]


def parse_group(name: str, raw: Json, default_format: str) -> ConfigGroup | str:
    """Return a config group, or the reason why it cannot be read."""
    if not isinstance(raw, dict):
        return "a value that is not a JSON object"
    targets = raw.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        return "targets that are not a list of names"
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


def targets_attention(raw: Json) -> bool:
    """Return True if vLLM ignores a group because it targets attention (`from_config`).

    vLLM uses the KV cache scheme for attention instead.
    """
    targets = raw.get("targets") if isinstance(raw, dict) else None
    return isinstance(targets, list) and len(targets) == 1 and str(targets[0]).endswith("Attention")


def targets_of(groups: Iterable[ConfigGroup]) -> Targets:
    """Return the groups by target, in vLLM's order.

    If a target occurs twice, it keeps its first position but gets the later group.
    """
    return {target: group for group in groups for target in group.targets}


def lookup_name(name: str) -> str:
    """Return the name that vLLM looks up. All experts of a layer use the first expert's name."""
    return EXPERT_NUMBER.sub("0", name)


def ignored(
    fused: str, members: Sequence[str], ignore: Patterns, architecture: Architecture
) -> Iterator[str]:
    """Yield the members of a fused layer that `ignore` matches.

    If `ignore` matches the fused layer, all members are ignored.
    """
    projection = fused.rpartition(".")[2]
    if fused not in members and ignore.match(fused) and moe_layer(members[0]) is None:
        yield from members
    elif _are_resolved(projection, members, architecture):
        yield from (member for member in members if ignore.match(lookup_name(member)))


def group_for(
    fused: str,
    members: Sequence[str],
    targets: Targets,
    architecture: Architecture,
    *,
    is_embedding: bool,
) -> ConfigGroup | None:
    """Return the config group of a layer that is not ignored.

    vLLM looks for the layer's name, then for the names of all members, then for the class.
    """
    projection, routed = fused.rpartition(".")[2], moe_layer(members[0]) is not None
    group = None if routed else _first(fused, targets)
    if group is None and _are_resolved(projection, members, architecture):
        of_members = [_first(lookup_name(member), targets) for member in members]
        group = of_members[0] if all(of_members) else None
    if group is not None:
        return group
    if routed and LINEAR in targets and EXPERTS_CLASS not in targets:
        targets = {**targets, EXPERTS_CLASS: targets[LINEAR]}
    kind = EMBEDDING_CLASS if is_embedding else _class_of(projection, members, architecture)
    return group_of_class(kind, targets)


def _are_resolved(projection: str, members: Sequence[str], architecture: Architecture) -> bool:
    """Return True if vLLM looks up a layer by the names of its members.

    This is always the case for routed experts and for layers with a single member.
    """
    alone = len(members) == 1 or moe_layer(members[0]) is not None
    return alone or projection in architecture.resolved


def _first(name: str, targets: Targets) -> ConfigGroup | None:
    return next((group for target, group in targets.items() if matches(target, name)), None)


def group_of_class(name: str, targets: Targets) -> ConfigGroup | None:
    """Return the first group with a target that matches a vLLM class, or None.

    A target is a part of the class name, in upper or lower case, or a regular expression.
    """
    for target, group in targets.items():
        if matches(target, name) if target.startswith(REGEX) else target.lower() in name.lower():
            return group
    return None


def _class_of(projection: str, members: Sequence[str], architecture: Architecture) -> str:
    if is_head(projection):
        return HEAD_CLASS
    if moe_layer(members[0]) is not None:
        return EXPERTS_CLASS
    if projection in architecture.row_parallel:
        return "RowParallelLinear"
    if projection in architecture.replicated:
        return "ReplicatedLinear"
    if projection == "qkv_proj":
        return "QKVParallelLinear"
    return "MergedColumnParallelLinear" if len(members) > 1 else "ColumnParallelLinear"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineTransform:
    """Entry of `apply` in a transform scheme.

    `kind` is the type of the scheme. `location` is the input or the output of a layer.
    """

    scheme: str
    kind: str
    location: str
    targets: Patterns
    ignore: Patterns

    @property
    def submodule(self) -> str:
        """Name of the submodule that stores the matrix."""
        return f"{self.scheme}_{self.location}"

    def applies(self, module: str) -> bool:
        """Return True if the transform rotates the inputs or outputs of a linear layer."""
        return self._matches(module, self.targets) and not self._matches(module, self.ignore)

    def _matches(self, module: str, patterns: Patterns) -> bool:
        return LINEAR in patterns or patterns.match(module)


def online_transforms(quantization: Mapping[str, Json]) -> Iterator[OnlineTransform]:
    """Yield the online transforms of a quantization config, and skip invalid entries."""
    config = quantization.get("transform_config")
    groups = config.get("config_groups") if isinstance(config, dict) else None
    for scheme, raw in groups.items() if isinstance(groups, dict) else ():
        entries = raw.get("apply") if isinstance(raw, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            if (
                isinstance(raw, dict)
                and isinstance(entry, dict)
                and entry.get("location") not in MERGED_LOCATIONS
            ):
                yield OnlineTransform(
                    scheme=scheme,
                    kind=str(raw.get("type")),
                    location=str(entry.get("location")),
                    targets=_patterns(entry.get("targets")),
                    ignore=_patterns(entry.get("ignore")),
                )


def _patterns(raw: Json) -> Patterns:
    listed = raw if isinstance(raw, list) else [raw] if isinstance(raw, str) else []
    return Patterns(map(str, listed))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """Linear layer: its fused layer, its tensors by parameter, and its config group or None."""

    name: str
    fused: FusedLayer
    parameters: Mapping[str, TensorInfo]
    group: ConfigGroup | None

    @property
    def is_quantized(self) -> bool:
        return bool(QUANTIZED_PARAMETERS & self.parameters.keys())

    @property
    def weight(self) -> TensorInfo | None:
        """Tensor with the layer's codes or values."""
        return self.parameters.get("weight_packed", self.parameters.get("weight"))

    def filled(self, parameter: str) -> TensorInfo | None:
        """Return a tensor of the layer, or None if it does not exist or is empty."""
        tensor = self.parameters.get(parameter)
        return tensor if tensor is not None and tensor.num_bytes else None


def fits(group: ConfigGroup, parameters: Mapping[str, TensorInfo]) -> bool:
    """Return True if a layer has exactly the tensors that a config group implies."""
    expected = group.expected(parameters)
    if expected is None or expected.keys() != parameters.keys() - {"bias"}:
        return False
    return all(form.accepts(parameters[parameter]) for parameter, form in expected.items())
