"""A checkpoint as the checks see it: its tensors by layer, and how vLLM reads its quantization
config.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from vexport.architectures import (
    Architecture,
    TableLookup,
    architecture_table,
    resolve,
    version_with,
)
from vexport.architectures.config import text_config
from vexport.architectures.fusion import FusedLayer, fuse, is_head, looked_up, moe_layer, part_names
from vexport.architectures.layout import ModelLayout, Shape, layout_of
from vexport.architectures.linears import PREDICTION, Names, names_of
from vexport.architectures.stored import linear_modules, quantized_parameters, split_name
from vexport.architectures.tables import table_versions
from vexport.architectures.versions import VersionFacts, facts_of, nearest_version, with_facts
from vexport.checkpoint.index import (
    QUANTIZATION_CONFIG,
    SourceIndex,
    StoredQuantization,
    find_quantization,
)
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.groups import (
    EMBEDDING_CLASS,
    ConfigGroup,
    OnlineTransform,
    StoredLayer,
    Targets,
    group_for,
    group_of_class,
    ignored,
    of_attention,
    online_transforms,
    parse_group,
    targets_of,
)
from vexport.checks.vllm.quant_methods import METHODS, method_name, read_method
from vexport.records import FLOATING, Finding, Json, LinearPlan, TensorInfo
from vexport.records.patterns import Patterns
from vexport.version import PINNED, Version

if TYPE_CHECKING:
    from vexport.checks.vllm.quant_methods.base import MethodGroup, QuantMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The vLLM and GPUs that a checkpoint is to be served with.

    Tensor parallel sizes and compute capabilities (90 for SM 9.0), each of which must do; the vLLM,
    by default `PINNED` or the first later version that has the model's class; the method of
    speculative decoding, empty for none.
    """

    tp: Sequence[int] = ()
    sm: Sequence[int] = ()
    vllm: Version | None = None
    speculative: str = ""


ANY = Target()
CheckFunction = Callable[["CheckpointView"], Iterator[Finding]]
# How configs count layers that draft (hf_config_override in vllm/config/speculative.py).
DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
NO_SHAPE: Shape = (None, None)


class CheckpointView:
    """One checkpoint under check; what is costly is computed once, when first asked for."""

    # Parameters that stand for their reciprocals in the files: vLLM's largest is the smallest here.
    reciprocals: Set[str] = frozenset()

    def __init__(
        self,
        index: SourceIndex,
        reader: Reader,
        target: Target = ANY,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        self.index = index
        self.reader = reader
        self.target = target
        # Digests by path, besides those in vexport.json; None if not asked for.
        self.digests = digests
        self.config_path = str(index.root / "config.json")
        # Cached by the names of a fused layer and its members.
        self._ignored: dict[tuple[str, ...], list[str]] = {}
        self._groups: dict[tuple[str, ...], ConfigGroup | None] = {}

    @cached_property
    def stored_quantization(self) -> StoredQuantization | None:
        """The quantization config with the place where it stands."""
        return find_quantization(self.index.root, self.index.config)

    @property
    def quantization(self) -> Mapping[str, Json] | None:
        """The quantization config, wherever vLLM finds one."""
        return self.stored_quantization.values if self.stored_quantization else None

    @property
    def quantization_place(self) -> str:
        """Return what names the quantization config in messages."""
        stored = self.stored_quantization
        return stored.place if stored else f"{self.config_path}: {QUANTIZATION_CONFIG}"

    @cached_property
    def text(self) -> Mapping[str, Json]:
        """The part of config.json that describes the language model."""
        return text_config(self.index.config)

    @cached_property
    def method(self) -> "QuantMethod | None":
        """The quantization method, where it is another than compressed-tensors and judged."""
        config = self.quantization
        name = method_name(config) if config is not None else None
        if config is None or name is None or name not in METHODS:
            return None
        stored = (tensor for tensor in self.index.tensors.values() if tensor.dtype not in FLOATING)
        quantized = {split_name(tensor.name)[0] for tensor in stored}
        return read_method(name, config, self.index.config, quantized, self.version)

    @cached_property
    def architecture(self) -> Architecture:
        """The layers of this class in vLLM; nothing is fused in a class that is not in the
        table.
        """
        if self.class_name not in architecture_table(self.version).architectures:
            return Architecture()
        architecture = resolve(self.class_name, self.index.config, self.version)[0]
        changed = self.facts.classes.get(self.class_name)
        if changed is None or self.version in table_versions():
            return architecture
        return with_facts(architecture, changed)

    @cached_property
    def names(self) -> Names:
        """The reading of the tensors' names."""
        return names_of(self.index, self.architecture)

    def drafts(self, name: str) -> bool:
        """Return whether a tensor or module is of a layer that predicts further tokens, which the
        config announces where it has a decoder layer's name."""
        layer, counts = self.names.draft_layer(name), map(self.text.get, DRAFTS)
        announced = next((count for count in counts if isinstance(count, int) and count), 0)
        behind = (
            layer is not None
            and int(layer.rpartition(".")[2]) < (self.names.layers or 0) + announced
        )
        return behind and announced > 0 or PREDICTION.search(name) is not None

    @cached_property
    def asked_version(self) -> Version:
        """The version of vLLM that the checkpoint is to be served with."""
        if self.target.vllm is not None:
            return self.target.vllm
        names = self.index.config.get("architectures")
        return version_with(str(names[0])) if isinstance(names, list) and names else PINNED

    @property
    def version(self) -> Version:
        """The version of vLLM whose rules are used: the one asked for, or the nearest known one."""
        return nearest_version(self.asked_version)

    @cached_property
    def facts(self) -> VersionFacts:
        """The schemes, methods and classes of the version of vLLM whose rules are used."""
        return facts_of(self.version)

    @cached_property
    def class_name(self) -> str:
        """The model class: the first that vLLM has of those that config.json names
        (resolve_model_cls in models/registry.py), else what its model type stands for; may be
        empty.
        """
        names = self.index.config.get("architectures")
        if isinstance(names, list) and names:
            classes = {*architecture_table(self.version).architectures, *self.facts.added}
            return str(next((name for name in names if str(name) in classes), names[0]))
        models = architecture_table(self.version).text_models
        return models.get(str(self.index.config.get("model_type")), "")

    @cached_property
    def layout(self) -> ModelLayout | None:
        """Return what the model's class and config ask for; None where that is not known."""
        layout = layout_of(
            self.class_name,
            self.index.config,
            self.architecture,
            self.index.tensors,
            self.version,
        )
        return None if layout is None else replace(layout, linears=self._as_stored(layout.linears))

    def _as_stored(self, linears: Mapping[str, Shape]) -> dict[str, Shape]:
        """Layers that the checkpoint stores fused, in the place of their parts: vLLM loads both."""
        merged = dict(linears)
        for fused in self.fused_layers:
            parts = part_names(fused.name, self.architecture)
            if fused.is_stored_fused and parts and merged.keys() >= {*parts}:
                shapes = [merged.pop(part) for part in parts]
                rows = [shape[0] for shape in shapes if shape[0] is not None]
                merged[fused.name] = (sum(rows) if len(rows) == len(shapes) else None, shapes[0][1])
        return merged

    @cached_property
    def config_groups(self) -> tuple[ConfigGroup, ...]:
        """The config groups that can be read, in order."""
        if self.method is not None:
            return tuple(self.method.groups)
        groups = (self.quantization or {}).get("config_groups")
        named = groups.items() if isinstance(groups, dict) else ()
        parsed = (
            parse_group(name, raw, self.format) for name, raw in named if not of_attention(raw)
        )
        return tuple(group for group in parsed if isinstance(group, ConfigGroup))

    @property
    def format(self) -> str:
        """The global storage format."""
        return str((self.quantization or {}).get("format"))

    @cached_property
    def ignore(self) -> Patterns:
        """The layers that the config leaves unquantized."""
        ignore = (self.quantization or {}).get("ignore")
        return Patterns(tuple(map(str, ignore)) if isinstance(ignore, (list, str)) else ())

    @cached_property
    def matched_ignore(self) -> Patterns:
        """`ignore` as vLLM compares it with its own names."""
        return Patterns(map(self.architecture.matched, self.ignore))

    def is_ignored(self, module: str, entries: Iterable[str]) -> bool:
        """Return whether any of some entries of `ignore` means a module by the name that vLLM has
        for it.
        """
        matched = Patterns(map(self.architecture.matched, entries))
        return matched.match(self.architecture.asked_name(module))

    @cached_property
    def transforms(self) -> tuple[OnlineTransform, ...]:
        """The rotations that are left to the running model."""
        return tuple(online_transforms(self.quantization or {}))

    def is_transform(self, module: str) -> bool:
        """Return whether a module is no layer but stores the matrix of such a rotation."""
        projection = module.rpartition(".")[2]
        return any(projection == transform.submodule for transform in self.transforms)

    @cached_property
    def modules(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """The tensors of each linear layer by parameter, in the order of the files."""
        return {
            name: parameters
            for name, parameters in linear_modules(self.index, self.architecture).items()
            if not self.is_transform(name)
        }

    @cached_property
    def fused_layers(self) -> tuple[FusedLayer, ...]:
        """All linear layers, fused as vLLM fuses them, in the order of the files."""
        return fuse(self.modules, self.architecture)

    def is_quantized(self, fused: FusedLayer) -> bool:
        """Return whether any member of a fused layer stores quantized tensors."""
        return any(quantized_parameters(self.modules[name]) for name in fused.members)

    @cached_property
    def layers(self) -> Mapping[str, StoredLayer]:
        """All linear layers by name."""
        return {
            name: StoredLayer(
                name=name,
                fused=fused,
                parameters=self.modules[name],
                group=self.group_of(fused),
            )
            for fused in self.fused_layers
            for name in fused.members
        }

    def single_value(self, tensor: TensorInfo | None) -> float | None:
        """The value of a parameter that has one; None for others."""
        if tensor is None or tensor.num_bytes == 0 or any(side != 1 for side in tensor.shape):
            return None
        return float(self.reader.array(tensor).reshape(-1)[0])

    def members(self, fused: FusedLayer) -> list[StoredLayer]:
        """Return the linear layers of one of the `fused_layers`."""
        return [self.layers[name] for name in fused.members]

    def shape_of(self, layer: StoredLayer) -> tuple[int, int] | None:
        """(out_features, in_features) of a layer with a group: by the model's config, else by its
        weight.
        """
        if layer.group is None:
            return None
        known = self.layout.modules if self.layout is not None else {}
        rows, columns = known.get(layer.name, NO_SHAPE)
        if rows is None or columns is None:
            return layer.group.shape(layer.parameters)
        turned = self.architecture.reordered.get(layer.name.rpartition(".")[2]) == "transposed"
        return (columns, rows) if turned else (rows, columns)

    def is_read(self, module: str) -> bool:
        """Return whether vLLM has a module, or may have one of that name."""
        layout = self.layout
        return layout is None or module in layout.modules or not layout.judges(f"{module}.")

    def sized(self, fused: FusedLayer, group: ConfigGroup | None) -> tuple[LinearPlan, ...] | None:
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

    @cached_property
    def targets(self) -> Targets:
        """The config groups by target, in the order in which vLLM tries them."""
        groups = targets_of(self.config_groups)
        return {self.architecture.matched(target): group for target, group in groups.items()}

    def ignored(self, fused: FusedLayer) -> list[str]:
        """The `lookup_names` of a fused layer that the config leaves unquantized: vLLM refuses some
        of them."""
        key = (fused.name, *fused.members)
        if key not in self._ignored:
            self._ignored[key] = self._find_ignored(fused)
        return self._ignored[key]

    def _find_ignored(self, fused: FusedLayer) -> list[str]:
        parts, method = self.lookup_names(fused), self.method
        if method is not None:
            return [name for name in parts if self._group_by_method(method, fused, name) is None]
        name = self.architecture.asked_name(fused.name)
        return list(ignored(name, parts, self.matched_ignore, self.architecture))

    def group_of(self, fused: FusedLayer) -> ConfigGroup | None:
        """The config group that vLLM applies to a fused layer; None where it stays unquantized."""
        key = (fused.name, *fused.members)
        if key not in self._groups:
            self._groups[key] = self._find_group(fused)
        return self._groups[key]

    def _find_group(self, fused: FusedLayer) -> ConfigGroup | None:
        if self.built_plain(fused) or len(self.ignored(fused)) == len(self.lookup_names(fused)):
            return None
        if self.method is not None:
            return self._group_by_method(self.method, fused, self.lookup_names(fused)[0])
        table = self.architecture.is_table(fused.name)
        if table and self.table_lookup != "name":
            return (
                group_of_class(EMBEDDING_CLASS, self.targets)
                if self.table_lookup == "class"
                else None
            )
        name, parts = self.architecture.asked_name(fused.name), self.lookup_names(fused)
        return group_for(name, parts, self.targets, self.architecture, table=table)

    def _group_by_method(
        self, method: "QuantMethod", fused: FusedLayer, name: str
    ) -> "MethodGroup | None":
        table = self.architecture.is_table(fused.name)
        if table or is_head(fused.name) and not method.quantizes_head:
            return None
        experts = moe_layer(name)
        return method.group_of(experts or fused.name, experts or name)

    @cached_property
    def table_lookup(self) -> TableLookup | None:
        """The way vLLM finds the config group of the table of tokens; by name where the class is
        unknown.
        """
        known = self.class_name in architecture_table(self.version).architectures
        return self.architecture.embedding if known else "name"

    def lookup_names(self, fused: FusedLayer) -> tuple[str, ...]:
        """The names by which vLLM looks for the group: all parts', also where it is stored as one
        or lacks some of them; those of the file for a method other than compressed-tensors."""
        name, members = fused.name, fused.members
        if self.method is None:
            name = self.architecture.asked_name(name)
            members = tuple(map(self.architecture.asked_name, members))
        if not fused.is_stored_fused:
            if {*members} == {name}:
                return members
            return looked_up(FusedLayer(name=name, members=members), self.architecture)
        return part_names(name, self.architecture) or members

    def built_plain(self, fused: FusedLayer) -> str | None:
        """The reason that vLLM never quantizes a layer (most routers); None where the config
        decides.
        """
        projection = fused.name.rpartition(".")[2]
        kind = self.architecture.kind(fused.name)
        plain = projection in self.architecture.unquantized and moe_layer(fused.name) is None
        built = self.layout is not None and not self.layout.plain.isdisjoint(fused.members)
        if plain or built or kind in ("plain", "lookup"):
            return f"{self.class_name} builds it without a quantization config"
        return None


def error(check: str, where: str, *, expected: str, got: str, fix: str) -> Finding:
    """A finding that fails the checkpoint."""
    return Finding(check=check, severity="error", where=where, expected=expected, got=got, fix=fix)


def warning(check: str, where: str, *, expected: str, got: str, fix: str) -> Finding:
    """A finding of an oddity that changes nothing, or that vLLM may mind on another device."""
    return Finding(
        check=check, severity="warning", where=where, expected=expected, got=got, fix=fix
    )


def info(check: str, where: str, *, expected: str, got: str, fix: str) -> Finding:
    """A finding of what is good to know."""
    return Finding(check=check, severity="info", where=where, expected=expected, got=got, fix=fix)
