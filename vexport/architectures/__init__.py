"""The layers of each model class in vLLM: fused, renamed, cut; tables generated for each vLLM
version (scripts/generate_architectures.py, generate_modules.py)."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, TypeVar

from pydantic import TypeAdapter

from vexport.architectures.tables import read_table, table_versions
from vexport.errors import InputError
from vexport.records import Finding, Json, Severity
from vexport.version import PINNED, Version, short_version

T = TypeVar("T")
# linear: asks the quantization config how it is stored, by its name. plain: a matrix that is built
# without one. table: embeddings that ask, lookup: embeddings that do not. head: the output head.
ModuleKind = Literal["linear", "plain", "table", "lookup", "head"]
# Numbers of layers and experts in a name.
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
# A numbered layer of a model.
STACK = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """The kinds of one class's modules, named as `Architecture.vllm_name` says, `*` for each
    number.

    `asked` are other names under which vLLM asks its quantization config for modules, decoder
    layers' too.
    """

    kinds: dict[str, ModuleKind] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTable:
    """The modules by class for one version of vLLM; `unknown` are classes that could not be
    built.
    """

    vllm: str
    unknown: frozenset[str]
    classes: Mapping[str, ModuleNames]


@cache
def module_table(version: Version = PINNED) -> ModuleTable:
    """Return the generated table for a version of vLLM."""
    return _generated(ModuleTable, "modules.json", version)


def with_stars(name: str) -> str:
    """A module's name without its numbers."""
    return NUMBER.sub("*", name)


def with_numbers(pattern: str, name: str) -> str:
    """A pattern with the numbers of a name for its stars, in their order."""
    numbers = iter(NUMBER.findall(name))
    return re.sub(r"(?<![^.])\*(?![^.])", lambda _: next(numbers, "*"), pattern)


# fused module name -> names of the layers that it is made of, in vLLM's order
FusedModules = Mapping[str, tuple[str, ...]]

# Fused layers of nearly all vLLM classes, used for a language model that is not in the table.
USUAL: FusedModules = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
}
USUAL_PARTS = {"qkv_proj": ("queries", "keys", "values"), "gate_up_proj": ("1", "1")}
USUAL_EXPERTS = ("gate_proj", "down_proj", "up_proj")
USUAL_ROW_PARALLEL = ("o_proj", "down_proj", "out_proj")
# Tables of embeddings of a module that is not in the table of modules, by the last part of its
# name.
TABLE_NAMES = re.compile(
    r"wte|wpe|(?!.*patch)\w*embed(?:ding)?s?|embed_(?:tokens(?:_per_layer)?|positions|in)"
)


# How vLLM finds a class's token embedding for quantization: by name or class, or by class alone.
TableLookup = Literal["name", "class"]
# Which tensors of a layer follow when vLLM's loader orders its rows again. scales by row: the
# weight and a scale of each row or of all. every tensor: each is taken for a row of values for each
# row of the weight. whole heads: each that has an output dimension, cut by heads. plain weight:
# `weight` alone, packed ones and scales do not. transposed: `weight` alone is stored (in, out) and
# turned around.
Reordering = Literal["scales by row", "every tensor", "whole heads", "plain weight", "transposed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Renames:
    """The way from a checkpoint's names to vLLM's: `WeightsMapper` in models/utils.py, in this
    order.
    """

    regex: Mapping[str, str] = field(default_factory=dict)
    substr: Mapping[str, str] = field(default_factory=dict)
    prefix: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, name: str) -> str:
        """vLLM's name of a tensor, or of an entry of its quantization config."""
        for pattern, new in self.regex.items():
            name = re.sub(pattern, new, name)
        for old, new in self.substr.items():
            name = name.replace(old, new, 1)
        for old, new in self.prefix.items():
            name = new + name[len(old) :] if name.startswith(old) else name
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model class of vLLM, in the names of a checkpoint's modules.

    `resolved` are the fused modules whose members vLLM's quantization config knows (for the others
    it looks for the fused name itself). `experts` are the names of an expert's gate, down and up
    projections, up None where it has no gate; `stacked_experts` other endings of the tensors that
    hold all experts, to vLLM's own; `transposed_experts` whether these are (experts, in, out).
    `reordered` layers get their rows in another order when vLLM loads them. `unquantized` layers
    are built without a quantization config, `routers` with one: vLLM quantizes them unless `ignore`
    names them. `parts` are the sizes of what layers are merged of, also where a checkpoint stores
    them as one (read by `config.py`), `groups` the number of groups of which each rank needs whole
    ones.
    `row_parallel` layers are cut along in_features by tensor parallelism, `replicated` ones not at
    all, the rest along out_features. `embedding` says how vLLM looks for the config group of the
    table of tokens, None where it never quantizes it. `language_model` are the attributes of a
    multimodal class that hold one, empty for a text model; `inner_unknown` where the checkpoint's
    config chooses its class. `kinds` are modules outside the decoder layers, and `asked` names
    under which vLLM asks for modules, both in vLLM's names with `*` for numbers (`modules.json`).
    `backend` is "transformers" for a class that vLLM runs with transformers' code, in which it
    replaces and fuses the layers that it recognizes.
    """

    backend: Literal["transformers"] | None = None
    fused: FusedModules = field(default_factory=dict)
    resolved: tuple[str, ...] = ()
    experts: tuple[str, str, str | None] | None = None
    stacked_experts: Mapping[str, str] = field(default_factory=dict)
    transposed_experts: bool = False
    reordered: Mapping[str, Reordering] = field(default_factory=dict)
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    unquantized: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    row_parallel: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    embedding: TableLookup | None = None
    renames: Renames = Renames()
    language_model: tuple[str, ...] = ()
    inner_unknown: bool = False
    kinds: dict[str, ModuleKind] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)

    def vllm_name(self, module: str) -> str:
        """vLLM's name of a checkpoint's module (`WeightsMapper.map_name` in models/utils.py)."""
        return self.renames(f"{module}.weight").removesuffix(".weight")

    def asked_name(self, module: str) -> str:
        """The name under which vLLM asks its quantization config for a checkpoint's module."""
        name = self.vllm_name(module)
        pattern = self.asked.get(with_stars(name))
        return name if pattern is None else with_numbers(pattern, name)

    def matched(self, entry: str) -> str:
        """Return what vLLM makes of an entry of `ignore` or of targets: it renames what names a
        layer (apply_vllm_mapper in compressed_tensors.py)."""
        return self.renames(entry) if "." in entry and not entry.startswith("re:") else entry

    def kind(self, module: str) -> ModuleKind | None:
        """The kind of module that vLLM builds for a checkpoint's outside decoder layers; None where
        that is unknown."""
        return self.kinds.get(with_stars(self.vllm_name(module)))

    def is_table(self, module: str) -> bool:
        """Return whether a module with a two-dimensional weight holds embeddings: as it is built,
        else by name."""
        kind = self.kind(module)
        if kind is not None:
            return kind in ("table", "lookup")
        return TABLE_NAMES.fullmatch(module.rpartition(".")[2]) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureTable:
    """One vLLM version's classes with a language model, and the text ones by transformers' model
    type.

    `transformers` is the version whose code the Transformers backend was asked about, `left_out`
    why a class that vLLM or transformers has is not among the architectures.
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

    This is `PINNED`, or, for a class that `PINNED` lacks, the first later version that has it.
    """
    later = (version for version in table_versions() if version > PINNED)
    known = (each for each in (PINNED, *later) if name in architecture_table(each).architectures)
    return next(known, PINNED)


# Endings of classes that vLLM makes of a class that generates text, and endings of the latter
# (_SUFFIX_TO_DEFAULTS in vllm/config/model.py, _normalize_arch in models/registry.py).
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
# How the reasons of classes begin that vLLM had and no longer has.
REMOVED = "vLLM had it until"


def left_out(name: str, version: Version = PINNED) -> str | None:
    """Return why a class of vLLM's registry is not in the table, or None if the registry does not
    have it.
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
    """Return a model class as a version of vLLM has it (default: as `version_with` says).

    Raises InputError if that vLLM does not have the class.
    """
    version = version or version_with(name)
    table = architecture_table(version)
    if name in table.architectures:
        modules = module_table(version).classes.get(name, ModuleNames())
        return replace(table.architectures[name], kinds=modules.kinds, asked=modules.asked)
    unknown = (
        f"neither a class of vLLM nor one with a tensor parallel plan of transformers "
        f"{table.transformers}"
    )
    raise InputError(
        f"architecture {name}",
        got=left_out(name, version) or unknown,
        need=f"a class that vLLM {table.vllm} generates text with",
        fix="see `vexport list architectures`",
    )


def resolve(
    name: str, config: Mapping[str, Json], version: Version | None = None
) -> tuple[Architecture, tuple[Finding, ...]]:
    """Return a model class with the language model that its config names, and the notes on it.

    Args:
        name: The class, as config.json names it.
        config: The whole config.json. A multimodal class may take any text model: the nested config
            says which one.
        version: The vLLM whose tables are used (default: as `version_with` says).

    Raises:
        InputError: That vLLM does not have the class.
    """
    version = version or version_with(name)
    outer = get_architecture(name, version)
    notes = (*_newer(name, version), *_unknown_modules(name, version))
    if not outer.inner_unknown:
        return outer, (*notes, *_backed(name, outer, version))
    inner_name = next(_text_models(config, architecture_table(version)), None)
    if inner_name is not None:
        inner = get_architecture(inner_name, version)
        return _joined(outer, inner), (*notes, *_backed(inner_name, inner, version))
    usual = Architecture(
        fused=USUAL, parts=USUAL_PARTS, experts=USUAL_EXPERTS, row_parallel=USUAL_ROW_PARALLEL
    )
    return _joined(outer, usual), (*notes, _assumed(name))


def _text_models(config: Mapping[str, Json], table: ArchitectureTable) -> Iterator[str]:
    """Yield the text models that the nested configs name, by class or by model type."""
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
    """A multimodal class around a language model: the inner one's layers, the outer one's names."""
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
        asked={
            f"{holder}.{old}": f"{holder}.{new}"
            for holder in holders
            for old, new in inner.asked.items()
        }
        | outer.asked,
    )


def _newer(name: str, version: Version) -> tuple[Finding, ...]:
    """Return a note on a class that vLLM has only since a version after `PINNED`."""
    if name in architecture_table().architectures or version == PINNED:
        return ()
    vllm = short_version(version)
    return (
        _note(
            "info",
            name,
            f"a class of vLLM {short_version()}",
            f"a class that was added in vLLM {vllm}; the rules of {vllm} are used",
            f"serve the output with vLLM {vllm} or later",
        ),
    )


def _unknown_modules(name: str, version: Version) -> tuple[Finding, ...]:
    """Return a warning on a multimodal class that could not be built to look at its towers."""
    unknown = module_table(version).unknown
    if name not in unknown or not get_architecture(name, version).language_model:
        return ()
    expected = "a class whose modules outside the language model are known"
    got = "one that is known by its source alone: embeddings and layers there are told by name"
    return (
        _note(
            "warning",
            name,
            expected,
            got,
            "load the output (`vexport load --dry`) before it is used",
        ),
    )


def _assumed(name: str) -> Finding:
    expected = "a nested config that names a text model of the table"
    got = f"none: the usual fused layers are assumed ({', '.join(USUAL)})"
    fix = "check the groups of the plan, and load the result in vLLM before it is used"
    return _note("warning", name, expected, got, fix)


def _backed(name: str, architecture: Architecture, version: Version) -> tuple[Finding, ...]:
    """Return a note on a class that vLLM runs with transformers' code."""
    if architecture.backend is None:
        return ()
    table = architecture_table(version)
    got = (
        f"vLLM {table.vllm}'s Transformers backend: it fuses what it recognizes in the model's "
        f"code, here of transformers {table.transformers}"
    )
    fix = "another transformers may be fused otherwise: ask it with `vexport load --dry`"
    return (_note("info", name, "a class of vLLM's own code", got, fix),)


def _note(severity: Severity, name: str, expected: str, got: str, fix: str) -> Finding:
    return Finding(
        check="architecture", severity=severity, where=name, expected=expected, got=got, fix=fix
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersTable:
    """One version of transformers: model classes by folder of the package."""

    transformers: str
    models: Mapping[str, tuple[str, ...]]


@cache
def transformers_table(version: Version = PINNED) -> TransformersTable:
    """Return the generated table of the transformers that a version of vLLM requires."""
    return _generated(TransformersTable, "transformers.json", version)


def transformers_models(kind: str, version: Version = PINNED) -> tuple[str, ...] | None:
    """Return the classes of a model type, or None if transformers does not have the type.

    The text model of a multimodal type has no separate folder.
    """
    models = transformers_table(version).models
    return models.get(kind, models.get(kind.removesuffix("_text")))


def _generated(table: type[T], file: str, version: Version) -> T:
    return TypeAdapter(table).validate_python(read_table(file, version))
