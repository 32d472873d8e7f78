"""A checkpoint as the checks see it: its tensors by layer, and how vLLM reads its quantization config."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from vexport.architectures import Architecture, FusedModules, architecture_table, resolve
from vexport.architectures.fusion import fuse, moe_layer
from vexport.architectures.history import ClassChanges, class_changes
from vexport.checkpoint.dtypes import FLOATING
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checks.arguments import ConfigGroup as ConfigGroup
from vexport.checks.arguments import parse_args as parse_args
from vexport.checks.arguments import parse_group as parse_group
from vexport.checks.decoder import Layout, layout_of
from vexport.checks.expected import layer_sides
from vexport.checks.target import ANY, PINNED, Target, said
from vexport.plan import is_embedding
from vexport.schemes.base import is_head
from vexport.types import Finding, Json, TensorInfo

# Parameters of a linear layer that compressed-tensors stores beside or instead of its weight.
QUANTIZED_LEAVES = frozenset(
    {
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight_global_scale",
        "input_scale",
        "input_zero_point",
        "input_global_scale",
    }
)
HEAD_CLASS = "ParallelLMHead"
# Routed experts are no linear layer, but a target Linear is taken for them too.
EXPERTS_CLASS = "RoutedExperts, Linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The layers that vLLM runs as one: module name -> parameter name -> tensor."""

    name: str
    members: Mapping[str, Mapping[str, TensorInfo]]

    @property
    def is_quantized(self) -> bool:
        """Whether any member stores quantized tensors."""
        return any(quantized_leaves(leaves) for leaves in self.members.values())


def quantized_leaves(leaves: Mapping[str, TensorInfo]) -> list[str]:
    """The parameters of a layer that are those of a quantized one; a weight of 8 bits is one by its dtype."""
    return sorted(
        leaf
        for leaf, tensor in leaves.items()
        if leaf in QUANTIZED_LEAVES or (leaf == "weight" and tensor.dtype not in FLOATING)
    )


class Subject:
    """One checkpoint under check; what is costly is computed once, when first asked for."""

    def __init__(self, index: SourceIndex, reader: Reader, target: Target = ANY) -> None:
        self.index = index
        self.reader = reader
        self.target = target
        self.config_path = str(index.root / "config.json")

    @cached_property
    def quantization(self) -> Mapping[str, Json] | None:
        """The quantization_config object, by its older name too, or None where there is none."""
        config = self.index.config
        value = config.get("quantization_config", config.get("compression_config"))
        return value if isinstance(value, dict) else None

    @cached_property
    def architecture(self) -> Architecture:
        """What vLLM does with this class; one that fuses nothing for a class that is not in the table."""
        if self.target.vllm != PINNED:
            older = class_changes().get(said(self.target.vllm), ClassChanges())
            if self.class_name in older.classes:
                return older.classes[self.class_name]
        if self.class_name not in architecture_table().architectures:
            return Architecture()
        return resolve(self.class_name, self.index.config)[0]

    @cached_property
    def class_name(self) -> str:
        """The model class: what config.json names, else what its model type stands for; may be empty."""
        names = self.index.config.get("architectures")
        if isinstance(names, list) and names:
            return str(names[0])
        return architecture_table().text_models.get(str(self.index.config.get("model_type")), "")

    @cached_property
    def layout(self) -> Layout | None:
        """What the model's class and config ask for; None where that is not known.

        Nor is it where tensors hold all experts of a layer, whose names and order differ by version.
        """
        if any(len(tensor.shape) > 2 and ".experts." in name for name, tensor in self.index.tensors.items()):
            return None
        return layout_of(self.class_name, self.index.config)

    @property
    def fused(self) -> FusedModules:
        """vLLM's fused modules for this class."""
        return self.architecture.fused

    @cached_property
    def config_groups(self) -> tuple[ConfigGroup, ...]:
        """The config groups that can be read, in order."""
        groups = (self.quantization or {}).get("config_groups")
        parsed = [parse_group(name, raw, self.format) for name, raw in _items(groups)]
        return tuple(group for group in parsed if isinstance(group, ConfigGroup))

    @property
    def format(self) -> str:
        """The global storage format."""
        return str((self.quantization or {}).get("format"))

    @cached_property
    def ignore(self) -> tuple[str, ...]:
        """The layers that the config leaves unquantized."""
        ignore = (self.quantization or {}).get("ignore")
        return tuple(str(name) for name in ignore) if isinstance(ignore, list) else ()

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """All linear layers, joined as vLLM joins them, in the order of the tensors."""
        modules = linear_modules(self.index)
        return tuple(
            Unit(name=name, members={member: modules[member] for member in members})
            for name, members in fuse(modules, self.architecture).items()
        )

    def sides(
        self, group: ConfigGroup, module: str, leaves: Mapping[str, TensorInfo]
    ) -> tuple[int, int] | None:
        """(out_features, in_features) of a quantized layer: by the model's config, else by its weight."""
        layout = self.layout
        known = (layout.linears.get(module) or layout.tables.get(module)) if layout is not None else None
        return known or layer_sides(group, leaves)

    def group_of(self, unit: Unit) -> ConfigGroup | None:
        """The config group that vLLM applies to a unit; None where it stays unquantized.

        Order as in find_matched_target (vLLM, compressed_tensors/utils.py): the fused name, all members'
        names, the class name; within each the first target in the order of the config.
        """
        if all(matches_any(module, self.ignore) for module in unit.members) or self._is_built_plain(unit):
            return None
        return self._by_name(unit) or self._by_class(unit)

    def _is_built_plain(self, unit: Unit) -> bool:
        """Whether vLLM builds a layer without the quantization config: routers, for one."""
        leaf = unit.name.rpartition(".")[2]
        return leaf in self.architecture.unquantized and moe_layer(unit.name) is None

    def _by_name(self, unit: Unit) -> ConfigGroup | None:
        for group in self.config_groups:
            if matches_any(unit.name, group.targets):
                return group
        owners = [
            next((group for group in self.config_groups if matches_any(module, group.targets)), None)
            for module in unit.members
        ]
        return owners[0] if owners and all(owners) else None

    def _by_class(self, unit: Unit) -> ConfigGroup | None:
        name = self._class_of(unit).lower()
        for group in self.config_groups:
            if any(target.lower() in name for target in group.targets if not target.startswith("re:")):
                return group
        return None

    def _class_of(self, unit: Unit) -> str:
        """The name of vLLM's class of a layer, as far as its name tells."""
        leaf = unit.name.rpartition(".")[2]
        if is_head(leaf):
            return HEAD_CLASS
        if moe_layer(next(iter(unit.members))) is not None:
            return EXPERTS_CLASS
        if leaf in self.architecture.row_parallel:
            return "RowParallelLinear"
        if leaf in self.architecture.replicated:
            return "ReplicatedLinear"
        if leaf == "qkv_proj":
            return "QKVParallelLinear"
        return "MergedColumnParallelLinear" if len(unit.members) > 1 else "ColumnParallelLinear"


def linear_modules(index: SourceIndex) -> dict[str, dict[str, TensorInfo]]:
    """Parameters by linear module: modules with quantized parameters or a two-dimensional weight."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for tensor in index.tensors.values():
        module, _, leaf = tensor.name.rpartition(".")
        if leaf in QUANTIZED_LEAVES or leaf in ("weight", "bias"):
            modules.setdefault(module, {})[leaf] = tensor
    return {name: leaves for name, leaves in modules.items() if _is_linear(name, leaves)}


def _is_linear(module: str, leaves: Mapping[str, TensorInfo]) -> bool:
    if QUANTIZED_LEAVES & leaves.keys():
        return True
    weight = leaves.get("weight")
    return weight is not None and len(weight.shape) == 2 and not is_embedding(module)


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name equals a pattern or matches an `re:` pattern from its start, as in vLLM."""
    return any(
        _matches(pattern[3:], name) if pattern.startswith("re:") else pattern == name for pattern in patterns
    )


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False


def _items(value: Json) -> Iterator[tuple[str, Json]]:
    if isinstance(value, dict):
        yield from value.items()


def error(check: str, where: str, *, expected: str, got: str, fix: str) -> Finding:
    """A finding that fails the checkpoint."""
    return Finding(check=check, severity="error", where=where, expected=expected, got=got, fix=fix)


def warning(check: str, where: str, *, expected: str, got: str, fix: str) -> Finding:
    """A finding of an oddity that changes nothing, or that vLLM may mind on another device."""
    return Finding(check=check, severity="warning", where=where, expected=expected, got=got, fix=fix)
