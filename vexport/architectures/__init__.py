"""Layers of each model class in vLLM: how they are fused, renamed and split.

The tables are generated for each vLLM version (scripts/generate_architectures.py,
generate_modules.py).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, NamedTuple, TypeVar

from pydantic import TypeAdapter

from vexport.architectures.tables import read_table, table_versions
from vexport.errors import InputError
from vexport.records import Finding, Json
from vexport.rules import architecture as rules
from vexport.version import PINNED, Version, short_version

T = TypeVar("T")
# linear: a linear layer whose name vLLM looks up in the quantization config. plain: a matrix that
# vLLM builds without a quantization config. table: embeddings whose name vLLM looks up in the
# config. lookup: embeddings that vLLM builds without a config. head: the output head.
ModuleKind = Literal["linear", "plain", "table", "lookup", "head"]
# Numbers of layers and experts in a name.
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
# A numbered layer in the name of a module.
NUMBERED_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """Kinds and lookup names of the modules of a class.

    All names are vLLM's names (see `Architecture.vllm_name`) with `*` for each number. `kinds` has
    the modules outside the decoder layers. `lookup_names` has the modules, also in decoder layers,
    that vLLM looks up in its quantization config under another name.
    """

    kinds: dict[str, ModuleKind] = field(default_factory=dict)
    lookup_names: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTable:
    """Names of the modules of each model class, for a version of vLLM.

    `unknown` are the classes that scripts/generate_modules.py could not build.
    """

    vllm: str
    unknown: frozenset[str]
    classes: Mapping[str, ModuleNames]


@cache
def module_table(version: Version = PINNED) -> ModuleTable:
    """Return the generated table for a version of vLLM."""
    return _generated(ModuleTable, "modules.json", version)


def with_stars(name: str) -> str:
    """Return a module's name with `*` for each number."""
    return NUMBER.sub("*", name)


def with_numbers(pattern: str, name: str) -> str:
    """Return a pattern with its stars replaced by the numbers in `name`, in their order."""
    numbers = iter(NUMBER.findall(name))
    return re.sub(r"(?<![^.])\*(?![^.])", lambda _: next(numbers, "*"), pattern)


class ExpertNames(NamedTuple):
    """Names of an expert's projections.

    If an expert has no gate, `gate` is the name of its up projection, and `up` is None.
    """

    gate: str
    down: str
    up: str | None


# Names of fused modules, with the names of the layers that vLLM fuses into each, in vLLM's order.
FusedModules = Mapping[str, tuple[str, ...]]

# Fused layers of nearly all vLLM classes. They are used for a language model that is not in
# the table.
USUAL_FUSED: FusedModules = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
}
# Sizes of the parts of USUAL_FUSED layers, as expressions (see `config.part_sizes`). Equal
# expressions mean that the parts have equal sizes.
USUAL_PARTS = {"qkv_proj": ("queries", "keys", "values"), "gate_up_proj": ("1", "1")}
USUAL_EXPERTS = ExpertNames("gate_proj", "down_proj", "up_proj")
USUAL_ROW_PARALLEL = ("o_proj", "down_proj", "out_proj")
# A module that is not in the table of modules counts as embeddings if this pattern matches the last
# part of its name.
EMBEDDING_NAMES = re.compile(
    r"wte|wpe|(?!.*patch)\w*embed(?:ding)?s?|embed_(?:tokens(?:_per_layer)?|positions|in)"
)


# How vLLM finds the config group of the token embeddings. "name": a target matches their name or
# their class. "class": only a target that matches their class.
EmbeddingLookup = Literal["name", "class"]
# Tensors that vLLM's loader reorders if it reorders the rows of a layer:
# - scales by row: the weight and its scales. A scale for the whole tensor is left as it is.
# - every tensor: all tensors of the layer. Each must have as many rows as the weight.
# - whole heads: all tensors with a dimension for the outputs, in blocks of heads.
# - plain weight: only `weight`, but neither packed weights nor scales.
# - transposed: only `weight`. It is stored as (in, out), and vLLM transposes it.
Reordering = Literal["scales by row", "every tensor", "whole heads", "plain weight", "transposed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Renames:
    """Rules that turn a checkpoint's names into vLLM's names, applied in this order.

    Source: `WeightsMapper` in models/utils.py.
    """

    regex: Mapping[str, str] = field(default_factory=dict)
    substr: Mapping[str, str] = field(default_factory=dict)
    prefix: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, name: str) -> str:
        """Return vLLM's name of a tensor, or of an entry of its quantization config."""
        for pattern, new in self.regex.items():
            name = re.sub(pattern, new, name)
        for old, new in self.substr.items():
            name = name.replace(old, new, 1)
        for old, new in self.prefix.items():
            name = new + name[len(old) :] if name.startswith(old) else name
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model class of vLLM, with the names of a checkpoint's modules.

    Attributes:
        backend: "transformers" for a class that vLLM runs with transformers' code. vLLM replaces
            and fuses the layers that it recognizes in this code.
        fused: The fused modules, with the layers that each contains.
        resolved: Fused modules whose members vLLM looks up in the quantization config. All other
            fused modules are looked up by the fused name.
        experts: The names of an expert's projections, or None if they are unknown.
        stacked_experts: Endings of tensors that hold all experts, with the endings in vLLM's names.
            They are used in addition to `linears.STACKED_EXPERTS`.
        transposed_experts: True if these tensors are (experts, in, out).
        reordered: Layers whose rows vLLM reorders when it loads them.
        parts: The sizes of the parts of each merged layer, as expressions for `config.part_sizes`.
            A merged layer is fused by vLLM, or already stored as one weight in the checkpoint.
        groups: The number of groups of heads in a layer, such as `n_groups` of Mamba, as an
            expression for `config.known_size`. Each rank needs whole groups.
        unquantized: Layers that are built without a quantization config.
        routers: Routers that are built with a quantization config. vLLM quantizes them unless
            `ignore` names them.
        row_parallel: Layers that tensor parallelism splits along in_features.
        replicated: Layers that tensor parallelism does not split. It splits all remaining layers
            along out_features.
        embedding: How vLLM finds the config group of the token embeddings, or None if it never
            quantizes them.
        renames: The rules that turn a checkpoint's names into vLLM's names.
        language_model: The attributes of a multimodal class that hold a language model. Empty for a
            text model.
        inner_unknown: True if the checkpoint's config chooses the class of the language model.
        kinds: Kinds of the modules outside the decoder layers, by vLLM's name with `*` for
            numbers (`modules.json`).
        lookup_names: Names that vLLM looks up in its quantization config, by vLLM's name
            with `*` for numbers (`modules.json`).
    """

    backend: Literal["transformers"] | None = None
    fused: FusedModules = field(default_factory=dict)
    resolved: tuple[str, ...] = ()
    experts: ExpertNames | None = None
    stacked_experts: Mapping[str, str] = field(default_factory=dict)
    transposed_experts: bool = False
    reordered: Mapping[str, Reordering] = field(default_factory=dict)
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    unquantized: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    row_parallel: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    embedding: EmbeddingLookup | None = None
    renames: Renames = Renames()
    language_model: tuple[str, ...] = ()
    inner_unknown: bool = False
    kinds: dict[str, ModuleKind] = field(default_factory=dict)
    lookup_names: dict[str, str] = field(default_factory=dict)

    def vllm_name(self, module: str) -> str:
        """Return vLLM's name of a checkpoint's module.

        Source: `WeightsMapper.map_name` in models/utils.py.
        """
        return self.renames(f"{module}.weight").removesuffix(".weight")

    def name_in_lookup(self, module: str) -> str:
        """Return the name by which vLLM's quantization config looks up a checkpoint's module."""
        name = self.vllm_name(module)
        pattern = self.lookup_names.get(with_stars(name))
        return name if pattern is None else with_numbers(pattern, name)

    def renamed_entry(self, entry: str) -> str:
        """Return an entry of `ignore` or of targets in the form that vLLM compares with its names.

        vLLM renames an entry that is the name of a layer (apply_vllm_mapper in
        compressed_tensors.py).
        """
        return self.renames(entry) if "." in entry and not entry.startswith("re:") else entry

    def kind(self, module: str) -> ModuleKind | None:
        """Return the kind of a module outside the decoder layers, or None if it is unknown.

        `module` is the checkpoint's name of the module.
        """
        return self.kinds.get(with_stars(self.vllm_name(module)))

    def is_embedding(self, module: str) -> bool:
        """Return True if a module with a two-dimensional weight holds embeddings.

        The kind of the module decides, or its name if the kind is unknown.
        """
        kind = self.kind(module)
        if kind is not None:
            return kind in ("table", "lookup")
        return EMBEDDING_NAMES.fullmatch(module.rpartition(".")[2]) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureTable:
    """All classes with a language model in a version of vLLM.

    `architectures` has the classes by name. `text_models` maps model types to names of classes.
    `left_out` maps each class that is left out to the reason. `transformers` is the version of
    transformers with which the classes of vLLM's Transformers backend were examined.
    """

    vllm: str
    transformers: str
    text_models: Mapping[str, str]
    left_out: Mapping[str, str]
    architectures: Mapping[str, Architecture]


@cache
def architecture_table(version: Version = PINNED) -> ArchitectureTable:
    """Return the generated table for a version of vLLM."""
    return _generated(ArchitectureTable, "vllm.json", version)


@cache
def version_with(name: str) -> Version:
    """Return the version of vLLM whose tables are used for a class.

    This is `PINNED` if it has the class, or else the first later version that has the class. If no
    version has the class, `PINNED` is returned.
    """
    later = (version for version in table_versions() if version > PINNED)
    known = (each for each in (PINNED, *later) if name in architecture_table(each).architectures)
    return next(known, PINNED)


# Endings of classes that generate text, and endings of classes that vLLM derives from them for
# other tasks (_SUFFIX_TO_DEFAULTS in vllm/config/model.py, _normalize_arch in models/registry.py).
GENERATING_ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
POOLING_ENDINGS = (
    "ForTextEncoding",
    "EmbeddingModel",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForAudioClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ClassificationModel",
    "ForRewardModeling",
    "RewardModel",
    "Model",
)
POOLED = "vLLM runs it to embed, score or classify, not to generate text"
# Start of the reason for a class that vLLM has removed.
REMOVED = "vLLM had it until"


def exclusion_reason(name: str, version: Version = PINNED) -> str | None:
    """Return why a class of vLLM's registry is not in the table.

    Return None if the class is in the table or not in the registry.
    """
    table = architecture_table(version)
    if name in table.left_out:
        return table.left_out[name]
    ending = next((ending for ending in POOLING_ENDINGS if name.endswith(ending)), None)
    if ending is None or name in table.architectures:
        return None
    bases = (name.removesuffix(ending) + other for other in GENERATING_ENDINGS)
    return POOLED if any(base in table.architectures for base in bases) else None


def get_architecture(name: str, version: Version | None = None) -> Architecture:
    """Return a model class in a version of vLLM (default: the version that `version_with` returns).

    Raises InputError if this version of vLLM does not have the class.
    """
    version = version or version_with(name)
    table = architecture_table(version)
    if name in table.architectures:
        modules = module_table(version).classes.get(name, ModuleNames())
        return replace(
            table.architectures[name], kinds=modules.kinds, lookup_names=modules.lookup_names
        )
    unknown = (
        f"neither a class of vLLM nor a class of transformers {table.transformers} with a tensor "
        f"parallel plan"
    )
    raise InputError.of(
        rules.UNKNOWN_CLASS,
        f"architecture {name}",
        reason=exclusion_reason(name, version) or unknown,
        vllm=table.vllm,
    )


def resolve(
    name: str, config: Mapping[str, Json], version: Version | None = None
) -> tuple[Architecture, tuple[Finding, ...]]:
    """Return the architecture of a model class, with notes and warnings about it.

    For a multimodal class, the architecture includes its language model.

    Args:
        name: The class, as config.json names it.
        config: The whole config.json. Some multimodal classes accept any text model, and a nested
            config names the text model.
        version: The vLLM version of the tables (default: see `version_with`).

    Raises:
        InputError: This version of vLLM does not have the class.
    """
    version = version or version_with(name)
    outer = get_architecture(name, version)
    notes = (*_newer_note(name, version), *_unknown_modules(name, version))
    if not outer.inner_unknown:
        return outer, (*notes, *_backend_note(name, outer, version))
    inner_name = next(_text_models(config, architecture_table(version)), None)
    if inner_name is not None:
        inner = get_architecture(inner_name, version)
        return _joined(outer, inner), (*notes, *_backend_note(inner_name, inner, version))
    usual = Architecture(
        fused=USUAL_FUSED, parts=USUAL_PARTS, experts=USUAL_EXPERTS, row_parallel=USUAL_ROW_PARALLEL
    )
    return _joined(outer, usual), (*notes, _assumed_note(name))


def _text_models(config: Mapping[str, Json], table: ArchitectureTable) -> Iterator[str]:
    for nested in config.values():
        if not isinstance(nested, dict):
            continue
        named = nested.get("architectures")
        candidates = [*(named if isinstance(named, list) else ())]
        candidates.append(table.text_models.get(str(nested.get("model_type"))))
        yield from (
            str(candidate)
            for candidate in candidates
            if candidate in table.architectures
            and not table.architectures[str(candidate)].language_model
        )
        yield from _text_models(nested, table)


def _joined(outer: Architecture, inner: Architecture) -> Architecture:
    """Combine a multimodal class (`outer`) with the class of its language model (`inner`).

    The result has the layers of both classes, under their names in the multimodal model.
    """
    holders = outer.language_model
    return replace(
        inner,
        fused={**outer.fused, **inner.fused},
        resolved=outer.resolved,
        unquantized=(*outer.unquantized, *inner.unquantized),
        routers=(*outer.routers, *inner.routers),
        renames=outer.renames,
        language_model=outer.language_model,
        kinds={f"{holder}.{name}": kind for holder in holders for name, kind in inner.kinds.items()}
        | outer.kinds,
        lookup_names={
            f"{holder}.{old}": f"{holder}.{new}"
            for holder in holders
            for old, new in inner.lookup_names.items()
        }
        | outer.lookup_names,
    )


def _newer_note(name: str, version: Version) -> tuple[Finding, ...]:
    if name in architecture_table().architectures or version == PINNED:
        return ()
    vllm = short_version(version)
    return (Finding.at(rules.NEWER_CLASS, name, vllm=vllm, pinned=short_version()),)


def _unknown_modules(name: str, version: Version) -> tuple[Finding, ...]:
    """Return a warning on a multimodal class with unknown modules outside the language model.

    They are unknown if scripts/generate_modules.py could not build the class.
    """
    unknown = module_table(version).unknown
    if name not in unknown or not get_architecture(name, version).language_model:
        return ()
    return (Finding.at(rules.UNKNOWN_MODULES, name),)


def _assumed_note(name: str) -> Finding:
    return Finding.at(rules.ASSUMED, name, layers=", ".join(USUAL_FUSED))


def _backend_note(name: str, architecture: Architecture, version: Version) -> tuple[Finding, ...]:
    """Return a note on a class that vLLM runs with transformers' code."""
    if architecture.backend is None:
        return ()
    table = architecture_table(version)
    return (Finding.at(rules.BACKEND, name, vllm=table.vllm, transformers=table.transformers),)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersTable:
    """Facts about a version of transformers.

    `accepted` maps model types to config keys, and these to values that the model type accepts
    although other models cannot use them. `models` has the model classes of each folder with code
    (a model type).
    """

    transformers: str
    accepted: Mapping[str, Mapping[str, tuple[float, ...]]]
    models: Mapping[str, tuple[str, ...]]


@cache
def transformers_table(version: Version = PINNED) -> TransformersTable:
    """Return the generated table for the transformers version that a version of vLLM requires."""
    return _generated(TransformersTable, "transformers.json", version)


def transformers_models(kind: str, version: Version = PINNED) -> tuple[str, ...] | None:
    """Return the classes of a model type, or None if transformers does not have the type.

    The type of a text model in a multimodal model (`_text`) has no folder. In this case the classes
    of the multimodal type are returned.
    """
    models, folder = transformers_table(version).models, kind.replace("-", "_")
    return models.get(folder, models.get(folder.removesuffix("_text")))


def _generated(table: type[T], file: str, version: Version) -> T:
    return TypeAdapter(table).validate_python(read_table(file, version))
