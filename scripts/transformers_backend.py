"""Describe model classes of vLLM's Transformers backend, from its modules built on the meta device.

The backend fuses layers that it recognizes in a model's code
(vllm/model_executor/models/transformers/fusers). Only a built model shows which layers are fused,
and under which names they are quantized.
"""

import multiprocessing
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten

import torch
from built_modules import QUANTIZATION
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
)
from transformers.core_model_loading import WeightRenaming
from transformers.models.auto import modeling_auto
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.transformers.base import Base
from vllm.model_executor.models.transformers.multimodal import MultiModalProcessingInfo
from vllm.utils.torch_utils import set_default_torch_dtype

from vexport.engine.dry.cell import configure
from vexport.engine.dry.fake_platform import PlaceholderValues, join_group, set_capability

Table = dict[str, object]
TASKS = ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_MULTIMODAL_LM")
_SMALL = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_MIXTURE = {"n_routed_experts": 8, "num_experts_per_tok": 2}
# Few layers for speed, and sizes for classes whose config has no usable defaults.
TRIED: tuple[Mapping[str, int], ...] = (
    {"num_hidden_layers": 4},
    {},
    _SMALL,
    {**_SMALL, **_MIXTURE},
    {
        **_SMALL,
        **_MIXTURE,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    {
        "num_hidden_layers": 4,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
    },
)
# Errors that do not come from vLLM: transformers' defaults make no model, but a real checkpoint
# may.
UNBUILT = "no model could be built of transformers' default config"
COMMON = {
    pattern
    for renaming in get_checkpoint_conversion_mapping("legacy")
    for pattern in renaming.source_patterns
}


class AskedNames(CompressedTensorsConfig):  # type: ignore[misc]
    """A quantization config that quantizes nothing.

    It records each layer that could be quantized, by the name that vLLM passes to it.
    """

    layers: dict[str, nn.Module]

    def get_quant_method(self, layer: nn.Module, prefix: str) -> UnquantizedLinearMethod | None:
        self.layers[prefix] = layer
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def generating_classes() -> dict[str, str]:
    found: dict[str, str] = {}
    for task in TASKS:
        for kind, names in getattr(modeling_auto, f"{task}_MAPPING_NAMES").items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, kind)
    return found


def has_tensor_parallel_plan(kind: str) -> bool:
    """Return True if the config of a model type has a plan for splitting layers.

    The plan may be in the config of its language model.
    """
    config = CONFIG_MAPPING[kind]
    inner = config.sub_configs.get("text_config", config)
    return bool(
        getattr(inner, "base_model_tp_plan", None) or getattr(config, "base_model_tp_plan", None)
    )


def describe_backed(classes: Mapping[str, str]) -> Iterator[tuple[str, Table | str]]:
    """Yield the entry of each class, or the reason why vLLM's backend refuses it.

    Each attempt runs in a separate process, because vLLM has a single set of groups per process.
    """
    left, reasons = dict(classes), dict[str, str]()
    for sizes in TRIED:
        tries = [(name, kind, sizes) for name, kind in sorted(left.items())]
        with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
            for name, found in pool.imap(_described, tries, chunksize=1):
                if isinstance(found, str):
                    reasons.setdefault(name, found)
                else:
                    del left[name]
                    yield name, found
    yield from ((name, reasons[name]) for name in left)


def _described(one_try: tuple[str, str, Mapping[str, int]]) -> tuple[str, Table | str]:
    name, kind, sizes = one_try
    try:
        return name, _entry(*_built(AutoConfig.for_model(kind, **sizes), name))
    except Exception as error:
        text = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
        return name, text if isinstance(error, ValueError) else f"{UNBUILT}: {text}"


def _built(config: PretrainedConfig, name: str) -> tuple[Base, AskedNames]:
    """Return the model as vLLM builds it, and the names that it passed to the quantization config.

    Raises the errors that vLLM raises.
    """
    MultiModalProcessingInfo._get_supported_modalities = lambda self: [
        "image"
    ]  # no processor is saved
    set_capability(90)
    config.architectures = [name]
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        engine = configure(Path(folder), {}, tp=1, trust_remote_code=False)
    asked = engine.quant_config = AskedNames.from_config(QUANTIZATION)
    asked.layers = {}
    with set_current_vllm_config(engine):
        if not torch.distributed.is_initialized():
            join_group(1, 0)
        with (
            torch.device("meta"),
            PlaceholderValues(),
            set_default_torch_dtype(engine.model_config.dtype),
        ):
            model = initialize_model(engine)
    if not isinstance(model, Base) or not hasattr(model, "lm_head"):
        raise TypeError(f"vLLM runs it as {type(model).__name__}, which generates no text")
    return model, asked


def _entry(model: Base, asked: AskedNames) -> Table:
    decoder = next(
        prefix for prefix, module in model.named_modules() if module is model.model.get_decoder()
    )
    linears = {name: layer for name, layer in asked.layers.items() if isinstance(layer, LinearBase)}
    inside = {name: layer for name, layer in linears.items() if name.startswith(f"{decoder}.")}
    multimodal = decoder not in ("model", "model.decoder") and model.config is not model.text_config
    # A head is also an embedding table.
    tables = [
        layer
        for layer in asked.layers.values()
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    ]
    entry: Table = {
        "backend": "transformers",
        "fused": {
            name: members
            for name, members in model.packed_modules_mapping.items()
            if len(members) > 1
        },
        "resolved": sorted(model.packed_modules_mapping),
        "experts": _expert_names(model),
        "unquantized": sorted({*_plain_leaves(model, {*map(_leaf, asked.layers)})}),
        "row_parallel": _leaves(inside, RowParallelLinear),
        "replicated": _leaves(inside, ReplicatedLinear),
        "embedding": "name" if tables else None,
        "renames": {"regex": dict(_renames(model))},
        "language_model": [decoder] if multimodal else [],
    }
    return {key: value for key, value in entry.items() if value not in ({}, [], None, False)}


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _leaves(layers: Mapping[str, nn.Module], kind: type[nn.Module]) -> list[str]:
    return sorted({_leaf(name) for name, layer in layers.items() if isinstance(layer, kind)})


def _plain_leaves(model: Base, asked: set[str]) -> Iterator[str]:
    fused = {member for members in model.packed_modules_mapping.values() for member in members}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        matrix = isinstance(weight, torch.Tensor) and weight.ndim == 2
        if matrix and not isinstance(module, nn.Embedding) and _leaf(name) not in asked | fused:
            yield _leaf(name)


def _expert_names(model: Base) -> list[str] | None:
    """Return the names of an expert's gate, down and up projections in a checkpoint."""
    if not any(isinstance(module, RoutedExperts) for module in model.modules()):
        return None
    patterns = [
        pattern
        for mapping in get_model_conversion_mapping(model.model)
        for pattern in mapping.source_patterns
    ]
    mixtral = any(re.search(r"experts.*\bw1\b", pattern) for pattern in patterns)
    return ["w1", "w2", "w3"] if mixtral else ["gate_proj", "down_proj", "up_proj"]


def _renames(model: Base) -> Iterator[tuple[str, str]]:
    """Return the rules that turn a checkpoint's names into vLLM's names, in vLLM's order."""
    mapper = model.hf_to_vllm_mapper
    for renaming in mapper.orig_to_new_renaming:
        if isinstance(renaming, WeightRenaming) and not COMMON & set(renaming.source_patterns):
            for pattern in renaming.source_patterns:
                yield pattern, renaming.target_patterns[0]
    for pattern, new in mapper.orig_to_new_regex.items():
        if new is not None:
            yield pattern.pattern, new
