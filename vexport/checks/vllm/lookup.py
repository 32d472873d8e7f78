"""Lookup of the config group that vLLM applies to each fused layer."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vexport.architectures.built import BuiltModel
from vexport.architectures.fusion import FusedLayer, is_head, lookup_names, moe_layer, part_names
from vexport.checks.vllm.groups import (
    EMBEDDING_CLASS,
    ConfigGroup,
    group_for,
    group_of_class,
    ignored,
)
from vexport.checks.vllm.quantization import Quantization
from vexport.records.patterns import Patterns

if TYPE_CHECKING:
    from vexport.checks.vllm.quant_methods.base import MethodGroup, QuantMethod


class GroupLookup:
    """Lookup of config groups as in vLLM: by name, by class, or by the rules of another method.

    `known` has the groups of a translated checkpoint, by the name of each quantized linear layer.
    """

    def __init__(
        self,
        model: BuiltModel,
        quantization: Quantization,
        known: Mapping[str, ConfigGroup] | None = None,
    ) -> None:
        self._model = model
        self._quantization = quantization
        self._known = known
        self._ignored: dict[FusedLayer, list[str]] = {}
        self._groups: dict[FusedLayer, ConfigGroup | None] = {}

    def group_of(self, fused: FusedLayer) -> ConfigGroup | None:
        """Return the config group that vLLM applies to a fused layer, None if it is unquantized."""
        if self._known is not None:
            return self._known.get(fused.members[0])
        if fused not in self._groups:
            self._groups[fused] = self._find_group(fused)
        return self._groups[fused]

    def ignored(self, fused: FusedLayer) -> list[str]:
        """Return the `names` of a fused layer that the config leaves unquantized.

        vLLM refuses a fused layer if the config only lists some of its names.
        """
        if fused not in self._ignored:
            self._ignored[fused] = self._find_ignored(fused)
        return self._ignored[fused]

    def is_ignored(self, module: str, entries: Iterable[str]) -> bool:
        """Return True if an entry of `ignore` matches vLLM's name for a module."""
        architecture = self._model.architecture
        renamed_entry = Patterns(map(architecture.renamed_entry, entries))
        return renamed_entry.match(architecture.name_in_lookup(module))

    def names(self, fused: FusedLayer) -> tuple[str, ...]:
        """Return the names that vLLM uses to look up the group of a fused layer.

        These are the names of all parts, even if the layer is stored fused or some parts are
        missing. For a method other than compressed-tensors, they are the names in the files.
        """
        architecture = self._model.architecture
        name, members = fused.name, fused.members
        if self._quantization.method is None:
            name = architecture.name_in_lookup(name)
            members = tuple(map(architecture.name_in_lookup, members))
        if fused.is_stored_fused:
            return part_names(name, architecture) or members
        if {*members} == {name}:
            return members
        return lookup_names(FusedLayer(name=name, members=members), architecture)

    def unquantized_reason(self, fused: FusedLayer) -> str | None:
        """Return why vLLM never quantizes a layer, or None if the quantization config decides.

        For example, vLLM never quantizes most routers.
        """
        model = self._model
        kind = model.architecture.kind(fused.name)
        is_listed = fused.projection in model.architecture.unquantized
        is_unquantized_projection = is_listed and moe_layer(fused.name) is None
        # The layout lists the layers that the class builds without a quantization config.
        is_unquantized_layer = model.layout is not None and not model.layout.plain.isdisjoint(
            fused.members
        )
        if is_unquantized_projection or is_unquantized_layer or kind in ("plain", "lookup"):
            return f"{model.class_name} builds it without a quantization config"
        return None

    def _find_ignored(self, fused: FusedLayer) -> list[str]:
        names, method = self.names(fused), self._quantization.method
        if method is not None:
            return [name for name in names if self._group_by_method(method, fused, name) is None]
        architecture = self._model.architecture
        lookup_name = architecture.name_in_lookup(fused.name)
        return list(ignored(lookup_name, names, self._quantization.matched_ignore, architecture))

    def _find_group(self, fused: FusedLayer) -> ConfigGroup | None:
        names = self.names(fused)
        if self.unquantized_reason(fused) or len(self.ignored(fused)) == len(names):
            return None
        if self._quantization.method is not None:
            return self._group_by_method(self._quantization.method, fused, names[0])
        architecture = self._model.architecture
        targets = self._quantization.targets
        is_embedding = architecture.is_embedding(fused.name)
        if is_embedding and self._model.embedding_lookup == "class":
            return group_of_class(EMBEDDING_CLASS, targets)
        if is_embedding and self._model.embedding_lookup != "name":
            return None
        lookup_name = architecture.name_in_lookup(fused.name)
        return group_for(lookup_name, names, targets, architecture, is_embedding=is_embedding)

    def _group_by_method(
        self, method: "QuantMethod", fused: FusedLayer, name: str
    ) -> "MethodGroup | None":
        is_embedding = self._model.architecture.is_embedding(fused.name)
        if is_embedding or is_head(fused.name) and not method.quantizes_head:
            return None
        experts = moe_layer(name)
        return method.group_of(experts or fused.name, experts or name)
