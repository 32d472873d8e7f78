"""Modules and tensors that a version of vLLM builds for a checkpoint.

They are computed from its config.json and the names of its tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

from vexport.architectures import (
    Architecture,
    EmbeddingLookup,
    architecture_table,
    resolve,
    version_with,
)
from vexport.architectures.config import text_config
from vexport.architectures.fusion import FusedLayer, fuse, part_names
from vexport.architectures.layout import ModelLayout, Shape, layout_of
from vexport.architectures.linears import PREDICTION, Names, names_of
from vexport.architectures.stored import Headers, linear_modules
from vexport.architectures.tables import table_versions
from vexport.architectures.versions import VersionFacts, facts_of, nearest_version, with_facts
from vexport.records import Json, TensorInfo
from vexport.version import PINNED, Version

# Config keys with the number of draft layers, which predict further tokens for speculative decoding
# (hf_config_override in vllm/config/speculative.py).
DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def any_layer(module: str) -> bool:
    """Return True: by default, all modules with a linear layer's tensors are linear layers."""
    return True


class BuiltModel:
    """Model class, names, linear layers and tensors of a checkpoint in a version of vLLM.

    Everything is computed at its first use.

    Args:
        headers: The config and the tensors of the checkpoint.
        target_version: The version of vLLM that will serve the checkpoint. By default this is
            `PINNED`, or the first later version that has the model's class.
        is_layer: Returns False for modules with a matrix that are not linear layers.
    """

    def __init__(
        self,
        headers: Headers,
        target_version: Version | None = None,
        is_layer: Callable[[str], bool] = any_layer,
    ) -> None:
        self._headers = headers
        self._target_version = target_version
        self._is_layer = is_layer

    @cached_property
    def target_version(self) -> Version:
        """Version of vLLM that will serve the checkpoint."""
        if self._target_version is not None:
            return self._target_version
        names = self._headers.config.get("architectures")
        return version_with(str(names[0])) if isinstance(names, list) and names else PINNED

    @property
    def version(self) -> Version:
        """Version of vLLM with the rules for `target_version`.

        This is `target_version`, or the nearest version with rules.
        """
        return nearest_version(self.target_version)

    @cached_property
    def facts(self) -> VersionFacts:
        """Schemes, methods and classes of `version`."""
        return facts_of(self.version)

    @cached_property
    def class_name(self) -> str:
        """Name of the model class.

        This is the first class in config.json that vLLM has (resolve_model_cls in
        models/registry.py), or the first class if vLLM has none of them. If the config names no
        classes, it is the class of the config's model type, or empty if vLLM has no class for it.
        """
        names = self._headers.config.get("architectures")
        if isinstance(names, list) and names:
            classes = {*architecture_table(self.version).architectures, *self.facts.added}
            return str(next((name for name in names if str(name) in classes), names[0]))
        models = architecture_table(self.version).text_models
        return models.get(str(self._headers.config.get("model_type")), "")

    @cached_property
    def architecture(self) -> Architecture:
        """Layers of the class. If the class is not in the table, no layers are fused."""
        if self.class_name not in architecture_table(self.version).architectures:
            return Architecture()
        architecture = resolve(self.class_name, self._headers.config, self.version)[0]
        changed = self.facts.classes.get(self.class_name)
        if changed is None or self.version in table_versions():
            return architecture
        return with_facts(architecture, changed)

    @cached_property
    def embedding_lookup(self) -> EmbeddingLookup | None:
        """How vLLM finds the config group of the token embeddings; "name" for unknown classes."""
        known = self.class_name in architecture_table(self.version).architectures
        return self.architecture.embedding if known else "name"

    @cached_property
    def text(self) -> Mapping[str, Json]:
        """Part of config.json that describes the language model."""
        return text_config(self._headers.config)

    @cached_property
    def names(self) -> Names:
        """Facts that are needed to interpret the tensors' names."""
        return names_of(self._headers, self.architecture)

    def is_draft(self, name: str) -> bool:
        """Return True if a tensor or module is part of a layer that predicts further tokens.

        A layer with the name of a decoder layer is only a draft layer if the config declares it.
        """
        if PREDICTION.search(name) is not None:
            return True
        layer = self.names.draft_layer(name)
        counts = map(self.text.get, DRAFTS)
        declared = next((count for count in counts if isinstance(count, int) and count), 0)
        if layer is None or declared <= 0:
            return False
        return int(layer.rpartition(".")[2]) < (self.names.layers or 0) + declared

    @cached_property
    def modules(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """Tensors of each linear layer by parameter, in the order of the files."""
        modules = linear_modules(self._headers, self.architecture)
        return {name: tensors for name, tensors in modules.items() if self._is_layer(name)}

    @cached_property
    def fused_layers(self) -> tuple[FusedLayer, ...]:
        """All linear layers, fused as vLLM fuses them, in the order of the files."""
        return fuse(self.modules, self.architecture)

    @cached_property
    def layout(self) -> ModelLayout | None:
        """Tensors that the config implies, or None if they are unknown."""
        layout = layout_of(
            self.class_name,
            self._headers.config,
            self.architecture,
            self._headers.tensors,
            self.version,
        )
        return None if layout is None else replace(layout, linears=self._as_stored(layout.linears))

    def _as_stored(self, linears: Mapping[str, Shape]) -> dict[str, Shape]:
        """Replace the parts of a layer by the fused layer if the checkpoint stores the fused layer.

        vLLM loads fused layers and separate parts.
        """
        merged = dict(linears)
        for fused in self.fused_layers:
            parts = part_names(fused.name, self.architecture)
            if fused.is_stored_fused and parts and merged.keys() >= {*parts}:
                shapes = [merged.pop(part) for part in parts]
                rows = [shape[0] for shape in shapes if shape[0] is not None]
                merged[fused.name] = (sum(rows) if len(rows) == len(shapes) else None, shapes[0][1])
        return merged

    def has_module(self, module: str) -> bool:
        """Return True if vLLM has, or may have, a module with that name."""
        layout = self.layout
        if layout is None or module in layout.modules:
            return True
        return not layout.is_complete_around(f"{module}.")
