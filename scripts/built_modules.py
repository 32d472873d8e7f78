"""Build a class of vLLM, and collect its kinds of modules.

Also collect the names under which its layers look up their quantization config, if they differ from
the names in files. The class is built from small configs. It loads the tensors of transformers'
models with these configs, from files with headers but without data.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import getsource
from pathlib import Path
from typing import TypeAlias

import torch
import transformers
from model_classes import language_models, load_class, namespace
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import default_loader, weight_utils
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.transformers_utils.config import _CONFIG_REGISTRY, _register_config_class
from vllm.utils.torch_utils import set_default_torch_dtype

from vexport.architectures import NUMBERED_LAYER, ModuleKind, with_numbers, with_stars
from vexport.checkpoint.dtypes import num_bytes
from vexport.checkpoint.writer import header_bytes
from vexport.engine.dry.audit import Audit, HeaderFile
from vexport.engine.dry.cell import _optional, configure
from vexport.engine.dry.fake_platform import PlaceholderValues, join_group, set_capability
from vexport.records import TensorSpec

Values: TypeAlias = dict[str, object]
LAYERS = re.compile(r"(?:\w*_)?(?:layers?|depth|blocks)")
# FEW layers are enough to see a module of each kind. If a class cannot be built with FEW layers,
# all are built.
FEW, ALL = 4, 1 << 20
# Keys for the number of experts in a layer, and for the number of experts that a token is routed
# to.
EXPERTS = re.compile(r"(\w+_)?(routed_|local_)?experts")
CHOSEN = re.compile(r"(?!index_)(\w+_)?(per_tok|top_?k|topk_experts)(_experts)?")
FEW_EXPERTS, FEW_CHOSEN = 8, 2
# Vision towers that wrappers choose by the type of their nested config.
TOWERS = ("clip_vision_model", "siglip_vision_model", "pixtral")
# Keys that each config on the hub sets. They are None in a default config, but vLLM needs a number.
COUNTS = ("n_group", "topk_group", "num_experts_per_tok")
# Nothing is quantized, but every layer calls the quantization config.
QUANTIZATION: Values = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["re:.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}
CAPABILITY = 90
# At most this many tensors that vLLM refuses are left out, one after another.
MOST_REFUSALS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Recipe for the config of a class.

    `model_type` is a model type of transformers or vLLM, `tower` the model type of a vision tower.
    """

    architecture: str
    model_type: str
    tower: str = ""
    layers: int = FEW

    def values(self) -> Values:
        """Return the default config with few layers."""
        without_packages()
        config = filled(AutoConfig.for_model(self.model_type))
        if self.tower:
            config.vision_config = AutoConfig.for_model(self.tower)
        values: Values = json.loads(json.dumps(config.to_dict(), default=str))
        shorten(values, self.layers, {})
        return values | {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "dtype": "bfloat16",
        }

    def write(self, folder: Path, missing: Mapping[str, object]) -> None:
        """Write config.json, and the tensors if transformers has the model.

        `missing` has keys to add.
        """
        values = self.values()
        shorten(
            values, ALL, {key: nested_value(values, key, value) for key, value in missing.items()}
        )
        file = folder / "config.json"
        file.write_text(json.dumps(values))
        model = getattr(transformers, self.architecture, None)
        if model is not None:
            config = AutoConfig.from_pretrained(folder)
            with torch.device("meta"), PlaceholderValues():
                made = model._from_config(config, dtype=torch.bfloat16)
            tensors = stored_tensors(made, config)
            save({name: tuple(tensor.shape) for name, tensor in tensors.items()}, folder)
        file.write_text(json.dumps({**values, "quantization_config": QUANTIZATION}))


def recipes(architecture: str) -> Iterator[list[Recipe]]:
    """Yield lists of configs for a class.

    The first config of each list that can be built is used.
    """
    kinds = transformers_types(architecture) or own_types(architecture)
    parts = [getattr(type(AutoConfig.for_model(kind)), "sub_configs", {}) for kind in kinds]
    towers = TOWERS if any(part.get("vision_config") is AutoConfig for part in parts) else ()
    for tower in ("", *towers):
        yield [
            Recipe(architecture=architecture, model_type=kind, tower=tower, layers=layers)
            for kind in kinds
            for layers in (FEW, ALL)
        ]


def without_packages() -> None:
    """Replace a vision tower by an empty module if its package (timm) is not installed."""
    make = AutoModel.from_config

    def from_config(*arguments: object, **options: object) -> nn.Module:
        try:
            tower: nn.Module = make(*arguments, **options)
        except ImportError:
            tower = nn.Module()
        return tower

    AutoModel.from_config = from_config


def transformers_types(architecture: str) -> list[str]:
    found = [
        kind
        for name, mapping in vars(modeling_auto).items()
        if name.startswith("MODEL_") and name.endswith("_NAMES")
        for kind, names in mapping.items()
        if architecture in (names if isinstance(names, tuple | list) else (names,))
    ]
    return list(dict.fromkeys(found))


def own_types(architecture: str) -> list[str]:
    """Return the model types with a config in vLLM that the module of a class names."""
    entry = {**registry._MULTIMODAL_MODELS, **registry._TEXT_GENERATION_MODELS}[architecture]
    module = namespace(load_class(*entry))
    text = getsource(module)
    names = {kind: _CONFIG_REGISTRY[kind].__name__ for kind in _CONFIG_REGISTRY}
    found = [kind for kind, name in names.items() if re.search(rf"\b{name}\b", text)]
    for kind in found:
        _register_config_class(kind, _CONFIG_REGISTRY[kind])
    return sorted(found, key=lambda kind: kind != entry[0].rpartition(".")[2])


def filled(config: PretrainedConfig) -> PretrainedConfig:
    """Fill in the nested configs that are None by default, and return the config."""
    for key, kind in getattr(type(config), "sub_configs", {}).items():
        if getattr(config, key, None) is None and kind is not AutoConfig:
            setattr(config, key, kind())
    return config


def nested_value(values: Values, key: str, default: object) -> object:
    """Return the value of a key in a nested config, or the default if no nested config has it."""
    nested = [value for value in values.values() if isinstance(value, dict)]
    found = (each[key] for each in nested if each.get(key) is not None)
    return next(found, default)


def shorten(values: Values, layers: int, missing: Mapping[str, object]) -> None:
    """Reduce the numbers of layers, and the lists with an entry for each layer.

    Add the keys that vLLM needs.
    """
    for key in ("id2label", "label2id", "per_layer_config"):
        values.pop(key, None)
    counts = {
        value for key, value in values.items() if LAYERS.fullmatch(key) and type(value) is int
    }
    many = {count for count in counts if isinstance(count, int) and count > layers}
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    asked = "head_dim" in values or "head_dim" in missing
    if (
        asked
        and isinstance(heads, int)
        and isinstance(hidden, int)
        and values.get("head_dim") is None
    ):
        values["head_dim"] = hidden // heads
    values.update({key: 1 for key in COUNTS if key in values and values[key] is None})
    values.update(
        {key: heads for key in ("num_key_value_heads",) if key in values and values[key] is None}
    )
    values.update(
        {
            key: 0
            for key in ("pad_token_id", "num_kv_shared_layers")
            if isinstance(values.get(key), int)
        }
    )
    values.update({key: value for key, value in missing.items() if key not in values})
    for key, value in list(values.items()):
        if isinstance(value, dict) and key.endswith("config"):
            shorten(value, layers, missing)
        elif isinstance(value, list) and len(value) in many:
            values[key] = value[:layers]
        elif LAYERS.fullmatch(key) and type(value) is int and value in many:
            values[key] = layers
        elif EXPERTS.fullmatch(key) and type(value) is int:
            values[key] = min(value, FEW_EXPERTS)
        elif CHOSEN.fullmatch(key) and type(value) is int:
            values[key] = min(value, FEW_CHOSEN)


def save(shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    specs = [TensorSpec(name=name, dtype="BF16", shape=shape) for name, shape in shapes.items()]
    header = header_bytes(specs)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(num_bytes(spec.dtype, spec.shape) for spec in specs))


def stored_tensors(made: nn.Module, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = revert_weight_conversion(made, dict(made.state_dict()))
    if getattr(config.get_text_config(), "tie_word_embeddings", False):
        tensors = {
            name: tensor for name, tensor in tensors.items() if not name.endswith("lm_head.weight")
        }
    return tensors


@dataclass(slots=True, kw_only=True)
class Built:
    """Modules of a class, by vLLM's names with a star for each number.

    `lookup_names` has the names that the quantization config receives, if these names differ. For
    the parts of a fused module it has the name of the whole. `stored` has the use of each tensor in
    a file. `faults` has the tensors that vLLM would not have loaded correctly.
    """

    kinds: dict[str, ModuleKind] = field(default_factory=dict)
    lookup_names: dict[str, str] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigCall:
    """Call of the quantization config by a module.

    `prefix` is the module's name in the call. `members` are the members of its fused layer in the
    config at that time. Each model adds its members when it is built. A tower may therefore call
    before the language model has added any.
    """

    prefix: str
    members: tuple[str, ...]


class Books(Audit):  # type: ignore[no-untyped-call]
    """An audit that also returns where tensors were copied."""

    def copied(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Yield (stored tensor, parameter that it was copied to or that it became)."""
        names = {storage(parameter): name for name, parameter in model.named_parameters()}
        for stored, source in self._sources.items():
            targets = [*source.targets, storage(source.tensor)]
            yield from ((stored, names[target]) for target in targets if target in names)


def storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def build(folder: Path) -> Built:
    """Build the class of a folder's config on the meta device, and load the folder's tensors."""
    calls: dict[nn.Module, ConfigCall] = {}
    method = CompressedTensorsConfig.get_quant_method

    def record_call(self: CompressedTensorsConfig, layer: nn.Module, prefix: str) -> object:
        known = self.packed_modules_mapping.get(prefix.rpartition(".")[2], ())
        calls[layer] = ConfigCall(prefix=prefix, members=tuple(known))
        return method(self, layer, prefix)

    CompressedTensorsConfig.get_quant_method = record_call
    set_capability(CAPABILITY)
    config = configure(folder, {}, tp=1, trust_remote_code=False)
    with set_current_vllm_config(config):
        join_group(1, 0)
        with (
            torch.device("meta"),
            PlaceholderValues(),
            set_default_torch_dtype(config.model_config.dtype),
        ):
            model = initialize_model(config)
        if not (folder / "model.safetensors").is_file():
            return described(model, config, calls, {})
        audit, refused = load(model, config)
    built = described(model, config, calls, dict(stored_modules(model, audit)))
    modules = dict(model.named_modules())
    for tensor, parameter in audit.copied(model):
        built.stored.setdefault(tensor, stored_kind(modules[parameter.rpartition(".")[0]], calls))
    faults = list(audit.faults(model, optional=frozenset(_optional(model))))
    dropped = {fault.where: "dropped" for fault in faults if fault.kind == "unused"}
    built.stored = {**built.stored, **dropped, **dict.fromkeys(refused, "refused")}
    built.faults = [
        f"{fault.kind} {fault.where}: {fault.got}" for fault in faults if fault.kind != "unused"
    ]
    return built


def described(
    model: nn.Module,
    config: VllmConfig,
    calls: Mapping[nn.Module, ConfigCall],
    loaded: Mapping[str, str],
) -> Built:
    """Return the kinds of a model's modules by their names in files.

    `loaded` maps modules' names in files to vLLM's names.
    """
    built = Built()
    packed = config.quant_config.packed_modules_mapping
    inside, classes = language_models(type(model))
    modules = dict(model.named_modules())
    own: dict[str, str] = {}
    for name in modules:
        holder, dot, last_part = name.rpartition(".")
        own |= {name: name, **{f"{holder}{dot}{part}": name for part in packed.get(last_part, ())}}
    for name, module in {**own, **loaded}.items():
        kind = kind_of(modules[module], calls)
        in_language_model = not inside or name.startswith(
            tuple(f"{attribute}." for attribute in inside)
        )
        if kind is None or in_language_model and inside and not classes:
            continue
        if not (in_language_model and NUMBERED_LAYER.search(name)):
            built.kinds[with_stars(name)] = kind
        if kind in ("linear", "head") and modules[module] in calls:
            built.lookup_names.update(other_names(name, calls[modules[module]]))
    return built


def other_names(name: str, asked: ConfigCall) -> Iterator[tuple[str, str]]:
    """Yield (name in files, name in vLLM) for a module's part and whole if these names differ."""
    holder, dot, last_part = name.rpartition(".")
    asked_holder, _, whole = asked.prefix.rpartition(".")
    names = {name: asked.prefix}
    if last_part in asked.members:
        names = {name: f"{asked_holder}{dot}{last_part}", f"{holder}{dot}{whole}": asked.prefix}
    for old, new in names.items():
        if old != new and with_numbers(with_stars(new), old) == new:
            yield with_stars(old), with_stars(new)


def kind_of(module: nn.Module, calls: Mapping[nn.Module, ConfigCall]) -> ModuleKind | None:
    """Return the kind of a module for the quantization config.

    Returns None for a module without a weight and for a module that is not a separate layer.
    """
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or isinstance(module, RoutedExperts):
        return None
    if isinstance(module, ParallelLMHead):
        return "head"
    if isinstance(module, VocabParallelEmbedding | nn.Embedding):
        return "table" if module in calls else "lookup"
    if isinstance(module, LinearBase):
        return "linear" if module in calls else "plain"
    return "plain" if weight.dim() == 2 else None


def stored_kind(module: nn.Module, calls: Mapping[nn.Module, ConfigCall]) -> str:
    """Return the kind of module that a stored tensor belongs to.

    It is empty for other parameters.
    """
    if isinstance(module, RoutedExperts):
        return "experts"
    name = type(module).__name__
    if "Norm" in name:
        return "norm above one" if isinstance(module, GemmaRMSNorm) else "norm"
    if "Conv" in name:
        return "convolution"
    return kind_of(module, calls) or ""


def load(model: nn.Module, config: VllmConfig) -> tuple[Books, list[str]]:
    """Return the tensors that vLLM's loaders copied, and the tensors that they refused.

    Refused tensors are left out one after another.
    """
    audit = Books(1)
    refused: list[str] = []
    weight_utils.safe_open = partial(HeaderFile, audit)
    every_tensor = default_loader.safetensors_weights_iterator

    def accepted(*arguments: object, **options: object) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (pair for pair in every_tensor(*arguments, **options) if pair[0] not in refused)

    default_loader.safetensors_weights_iterator = accepted
    for _ in range(MOST_REFUSALS):
        with suppress(Exception), torch.device("meta"), audit:
            default_loader.DefaultModelLoader(config.load_config).load_weights(
                model, config.model_config
            )
            break
        refused.append(audit.last_source)
    return audit, refused


def stored_modules(model: nn.Module, audit: Books) -> Iterator[tuple[str, str]]:
    """Yield (module in the file, module with its weight).

    The file's name is the name after renaming by vLLM's class.
    """
    mapper = getattr(type(model), "hf_to_vllm_mapper", None)
    for stored, parameter in audit.copied(model):
        renamed = mapper.get_rename_mapper().map_name(stored) if mapper is not None else stored
        if renamed is not None and renamed.endswith(".weight") and parameter.endswith(".weight"):
            yield renamed.removesuffix(".weight"), parameter.removesuffix(".weight")
