"""Quantization config of a checkpoint as vLLM reads it."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from vexport.architectures.built import BuiltModel
from vexport.architectures.stored import split_name
from vexport.checkpoint.index import (
    QUANTIZATION_CONFIG,
    SourceIndex,
    StoredQuantization,
    find_quantization,
)
from vexport.checks.vllm.groups import (
    ConfigGroup,
    OnlineTransform,
    Targets,
    online_transforms,
    parse_group,
    targets_attention,
    targets_of,
)
from vexport.checks.vllm.quant_methods import METHODS, method_name, read_method
from vexport.records import FLOATING, Json
from vexport.records.patterns import Patterns

if TYPE_CHECKING:
    from vexport.checks.vllm.quant_methods.base import QuantMethod


class Quantization:
    """Quantization config of a checkpoint, from any place where vLLM finds it.

    Everything is computed at its first use. `values` is None if there is no config.
    """

    def __init__(self, index: SourceIndex, model: BuiltModel) -> None:
        self._index = index
        self._model = model

    @cached_property
    def stored(self) -> StoredQuantization | None:
        """Config with the place where it is stored."""
        return find_quantization(self._index.root, self._index.config)

    @property
    def values(self) -> Mapping[str, Json] | None:
        """Keys and values of the config."""
        return self.stored.values if self.stored else None

    @property
    def place(self) -> str:
        """Place of the config in messages."""
        if self.stored is not None:
            return self.stored.place
        return f"{self._index.root / 'config.json'}: {QUANTIZATION_CONFIG}"

    @cached_property
    def method(self) -> "QuantMethod | None":
        """Method, or None for compressed-tensors and for methods that vexport does not support."""
        name = method_name(self.values) if self.values is not None else None
        if self.values is None or name is None or name not in METHODS:
            return None
        tensors = self._index.tensors.values()
        stored = (tensor for tensor in tensors if tensor.dtype not in FLOATING)
        quantized = {split_name(tensor.name)[0] for tensor in stored}
        return read_method(name, self.values, self._index.config, quantized, self._model.version)

    @property
    def format(self) -> str:
        """Global storage format, or "null" without one."""
        return str((self.values or {}).get("format") or "null")

    @cached_property
    def config_groups(self) -> tuple[ConfigGroup, ...]:
        """Config groups that can be read, in order."""
        if self.method is not None:
            return tuple(self.method.groups)
        groups = (self.values or {}).get("config_groups")
        named = groups.items() if isinstance(groups, dict) else ()
        parsed = (
            parse_group(name, raw, self.format) for name, raw in named if not targets_attention(raw)
        )
        return tuple(group for group in parsed if isinstance(group, ConfigGroup))

    @cached_property
    def targets(self) -> Targets:
        """Config groups by target, in the order that vLLM tries."""
        groups = targets_of(self.config_groups)
        renamed_entry = self._model.architecture.renamed_entry
        return {renamed_entry(target): group for target, group in groups.items()}

    @cached_property
    def ignore(self) -> Patterns:
        """Names and patterns of the layers that the config leaves unquantized."""
        ignore = (self.values or {}).get("ignore")
        return Patterns(tuple(map(str, ignore)) if isinstance(ignore, (list, str)) else ())

    @cached_property
    def matched_ignore(self) -> Patterns:
        """`ignore` in the form that vLLM compares with its names of layers."""
        return Patterns(map(self._model.architecture.renamed_entry, self.ignore))

    @cached_property
    def transforms(self) -> tuple[OnlineTransform, ...]:
        """Rotations that the running model computes."""
        return tuple(online_transforms(self.values or {}))

    def is_transform(self, module: str) -> bool:
        """Return True if a module is not a layer, but stores the matrix of an online rotation."""
        projection = module.rpartition(".")[2]
        return any(projection == transform.submodule for transform in self.transforms)
