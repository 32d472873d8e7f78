"""Small configs of model classes, and the tensors of transformers' models of them: headers over holes."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import getsource
from pathlib import Path
from typing import TypeAlias

import torch
import transformers
from model_classes import load_class, namespace
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto
from vllm.model_executor.models import registry
from vllm.transformers_utils.config import _CONFIG_REGISTRY, _register_config_class

from vexport.checkpoint.dtypes import num_bytes
from vexport.checkpoint.writer import header_bytes
from vexport.engine.dry.fake_platform import AbsentValues
from vexport.records import TensorSpec

Values: TypeAlias = dict[str, object]
LAYERS = re.compile(r"(?:\w*_)?(?:layers?|depth|blocks)")
# So many layers are enough to see a module of each kind; where they are not possible, all are built.
FEW, ALL = 4, 1 << 20
# Experts of a layer, and those that a token goes to.
EXPERTS = re.compile(r"(\w+_)?(routed_|local_)?experts")
CHOSEN = re.compile(r"(?!index_)(\w+_)?(per_tok|top_?k|topk_experts)(_experts)?")
FEW_EXPERTS, FEW_CHOSEN = 8, 2
# Towers that wrappers take by the type of their nested config.
TOWERS = ("clip_vision_model", "siglip_vision_model", "pixtral")
# Lists of the hub's own for each class: None in a default config, and vLLM counts on a number.
COUNTS = ("n_group", "topk_group", "num_experts_per_tok")
# Nothing is quantized, but every layer asks.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a config of a class is made: by transformers' or vLLM's own model type, with a tower of a type."""

    architecture: str
    model_type: str
    tower: str = ""
    layers: int = FEW

    def values(self) -> Values:
        """The default config with few layers."""
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
        """config.json, and the tensors where transformers has the model. `missing` are keys to add."""
        values = self.values()
        shorten(values, ALL, {key: elsewhere(values, key, value) for key, value in missing.items()})
        file = folder / "config.json"
        file.write_text(json.dumps(values))
        model = getattr(transformers, self.architecture, None)
        if model is not None:
            config = AutoConfig.from_pretrained(folder)
            with torch.device("meta"), AbsentValues():
                made = model._from_config(config, dtype=torch.bfloat16)
            tensors = stored_tensors(made, config)
            save({name: tuple(tensor.shape) for name, tensor in tensors.items()}, folder)
        file.write_text(json.dumps({**values, "quantization_config": QUANTIZATION}))


def recipes(architecture: str) -> Iterator[list[Recipe]]:
    """The configs that a class is built from; of each list the first that can be built."""
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
    """Let an empty module stand for a tower whose package (timm) is not installed: it asks for nothing."""
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
    """The model types that vLLM has a config for, which the module of a class names."""
    entry = {**registry._MULTIMODAL_MODELS, **registry._TEXT_GENERATION_MODELS}[architecture]
    module = namespace(load_class(*entry))
    text = getsource(module)
    names = {kind: _CONFIG_REGISTRY[kind].__name__ for kind in _CONFIG_REGISTRY}
    found = [kind for kind, name in names.items() if re.search(rf"\b{name}\b", text)]
    for kind in found:
        _register_config_class(kind, _CONFIG_REGISTRY[kind])
    return sorted(found, key=lambda kind: kind != entry[0].rpartition(".")[2])


def filled(config: PretrainedConfig) -> PretrainedConfig:
    """A config with the nested ones that are None by default."""
    for key, kind in getattr(type(config), "sub_configs", {}).items():
        if getattr(config, key, None) is None and kind is not AutoConfig:
            setattr(config, key, kind())
    return config


def elsewhere(values: Values, key: str, default: object) -> object:
    """The value of a key in one of the nested configs, a default where none has it."""
    nested = [value for value in values.values() if isinstance(value, dict)]
    found = (each[key] for each in nested if each.get(key) is not None)
    return next(found, default)


def shorten(values: Values, layers: int, missing: Mapping[str, object]) -> None:
    """Cut the numbers of layers, and lists of so many entries; add what vLLM asks for."""
    for key in ("id2label", "label2id", "per_layer_config"):
        values.pop(key, None)
    counts = {value for key, value in values.items() if LAYERS.fullmatch(key) and type(value) is int}
    many = {count for count in counts if isinstance(count, int) and count > layers}
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    asked = "head_dim" in values or "head_dim" in missing
    if asked and isinstance(heads, int) and isinstance(hidden, int) and values.get("head_dim") is None:
        values["head_dim"] = hidden // heads
    values.update({key: 1 for key in COUNTS if key in values and values[key] is None})
    values.update({key: heads for key in ("num_key_value_heads",) if key in values and values[key] is None})
    values.update(
        {key: 0 for key in ("pad_token_id", "num_kv_shared_layers") if isinstance(values.get(key), int)}
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
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("lm_head.weight")}
    return tensors
