"""Checkpoints of real models' sizes: true headers over files that are holes."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from tests.architectures.families import hub_tensors
from vexport.checkpoint.index import INDEX_NAME
from vexport.checkpoint.writer import header_bytes
from vexport.records import TensorSpec

SHARD_BYTES = 5_000_000_000
# How vLLM is to choose experts: with a bias that is stored.
ROUTING: Mapping[str, object] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# The numbers of the models' own config.json on the hub.
CONFIGS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "Llama-3.3-70B": (
        "llama",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "Qwen3-235B-A22B": (
        "qwen3_moe",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
        },
    ),
    "Llama-3.1-405B": (
        "llama",
        {
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    # transformers' defaults are DeepSeek-V3's own but for what it does not read; the last layer predicts
    # a second token.
    "DeepSeek-V3": ("deepseek_v3", {"num_nextn_predict_layers": 1, **ROUTING}),
    "Kimi-K2": (
        "deepseek_v3",
        {
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "num_nextn_predict_layers": 0,
            "vocab_size": 163840,
            **ROUTING,
        },
    ),
}

# Smaller ones.
SMALLER: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "Llama-3.2-1B": (
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
    ),
    "Llama-3.1-8B": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
}


def save_headers(name: str, folder: Path) -> Path:
    """The checkpoint of a real model, each shard a header and a hole of the right size."""
    model_type, values = {**CONFIGS, **SMALLER}[name]
    config = AutoConfig.for_model(model_type, dtype="bfloat16", **values)
    architecture, tensors = hub_tensors(config, device="meta")
    specs = [TensorSpec(name=key, dtype="BF16", shape=tuple(tensor.shape)) for key, tensor in tensors.items()]
    specs += list(further_tokens(specs, config))
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(sorted(specs, key=lambda spec: spec.name)))
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header = header_bytes(shard)
        with (folder / file).open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + sum(_size(spec) for spec in shard))
        weight_map.update({spec.name: file for spec in shard})
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


def further_tokens(specs: list[TensorSpec], config: PretrainedConfig) -> Iterator[TensorSpec]:
    """DeepSeek's layer for a second token, stored as one more decoder layer: like the last, and more."""
    if not getattr(config, "num_nextn_predict_layers", 0):
        return
    last, hidden = config.num_hidden_layers - 1, config.hidden_size
    for spec in specs:
        if spec.name.startswith(f"model.layers.{last}."):
            name = spec.name.replace(f".{last}.", f".{last + 1}.", 1)
            yield TensorSpec(name=name, dtype=spec.dtype, shape=spec.shape)
    prefix, table = f"model.layers.{last + 1}", (config.vocab_size, hidden)
    yield TensorSpec(name=f"{prefix}.eh_proj.weight", dtype="BF16", shape=(hidden, 2 * hidden))
    yield TensorSpec(name=f"{prefix}.embed_tokens.weight", dtype="BF16", shape=table)
    yield TensorSpec(
        name=f"{prefix}.shared_head.head.weight", dtype="BF16", shape=(config.vocab_size, hidden)
    )
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield TensorSpec(name=f"{prefix}.{norm}.weight", dtype="BF16", shape=(hidden,))


def _shards(specs: list[TensorSpec]) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    filled = 0
    for spec in specs:
        if shard and filled + _size(spec) > SHARD_BYTES:
            yield shard
            shard, filled = [], 0
        shard.append(spec)
        filled += _size(spec)
    yield shard


def _size(spec: TensorSpec) -> int:
    size = 2
    for side in spec.shape:
        size *= side
    return size
