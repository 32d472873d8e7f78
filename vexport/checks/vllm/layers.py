"""Linear layers of a checkpoint: stored tensors, config group, size."""

from collections.abc import Mapping
from functools import cached_property

from vexport.architectures.built import BuiltModel
from vexport.architectures.fusion import FusedLayer
from vexport.architectures.layout import Shape
from vexport.architectures.stored import quantized_parameters
from vexport.checks.vllm.groups import ConfigGroup, StoredLayer
from vexport.checks.vllm.lookup import GroupLookup
from vexport.records import LinearPlan

NO_SHAPE: Shape = (None, None)


class StoredLayers:
    """All linear layers of a checkpoint."""

    def __init__(self, model: BuiltModel, lookup: GroupLookup) -> None:
        self._model = model
        self._lookup = lookup

    @cached_property
    def by_name(self) -> Mapping[str, StoredLayer]:
        """All linear layers by name."""
        return {
            name: StoredLayer(
                name=name,
                fused=fused,
                parameters=self._model.modules[name],
                group=self._lookup.group_of(fused),
            )
            for fused in self._model.fused_layers
            for name in fused.members
        }

    def members(self, fused: FusedLayer) -> list[StoredLayer]:
        """Return the linear layers of a fused layer."""
        return [self.by_name[name] for name in fused.members]

    def is_quantized(self, fused: FusedLayer) -> bool:
        """Return True if any member of a fused layer stores quantized tensors."""
        return any(quantized_parameters(self._model.modules[name]) for name in fused.members)

    @property
    def quantized(self) -> list[FusedLayer]:
        """Fused layers with at least one member that stores quantized tensors."""
        return [fused for fused in self._model.fused_layers if self.is_quantized(fused)]

    def shape_of(self, layer: StoredLayer) -> tuple[int, int] | None:
        """Return (out_features, in_features) of a layer, or None if the layer has no group or size.

        The size comes from the model's config, or from the stored tensors if the config has none.
        """
        if layer.group is None:
            return None
        known = self._model.layout.modules if self._model.layout is not None else {}
        rows, columns = known.get(layer.name, NO_SHAPE)
        if rows is None or columns is None:
            return layer.group.shape(layer.parameters)
        reordering = self._model.architecture.reordered.get(layer.name.rpartition(".")[2])
        return (columns, rows) if reordering == "transposed" else (rows, columns)

    def members_with_sizes(
        self, fused: FusedLayer, group: ConfigGroup | None
    ) -> tuple[LinearPlan, ...] | None:
        """Return the members of a fused layer with their sizes, or None if a size is unknown."""
        members: list[LinearPlan] = []
        for layer in self.members(fused):
            weight = layer.parameters.get("weight")
            shape = self.shape_of(layer) if group else weight.shape if weight else None
            if shape is None or len(shape) != 2:
                return None
            out_features, in_features = shape
            stored = layer.weight.name if layer.weight else layer.name
            members.append(
                LinearPlan(
                    name=layer.name,
                    weight=stored,
                    out_features=out_features,
                    in_features=in_features,
                )
            )
        return tuple(members)
