"""Checkpoints of zeros: what counts is in their headers and configs."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import save_file

from vexport.checkpoint.tensors import TORCH_DTYPES

Tensor = tuple[str, tuple[int, ...]]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "vocab_size": 384,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
QWEN3_MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


def sketch(
    folder: Path, config: Mapping[str, object], preset: str, change: Mapping[str, Tensor | None]
) -> Path:
    """A checkpoint of `config`, quantized but for lm_head and routers; `change` replaces or (None) drops."""
    tensors = model_tensors(config, preset)
    assert {name for name, tensor in change.items() if tensor is None} <= set(tensors)
    stored = {
        name: torch.zeros(tensor[1], dtype=TORCH_DTYPES[tensor[0]])
        for name, tensor in {**tensors, **change}.items()
        if tensor is not None
    }
    folder.mkdir(parents=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    scheme = preset_name_to_scheme(preset, ["Linear"])
    quantization = {
        "quant_method": "compressed-tensors",
        "format": infer_module_format(torch.nn.Linear, scheme).value,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.model_dump(mode="json", exclude={"format"})},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
    }
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


def model_tensors(config: Mapping[str, object], preset: str) -> dict[str, Tensor]:
    """Every tensor of a Llama or a Qwen3-MoE of this config."""
    sizes = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": ("BF16", (vocabulary, hidden)),
        "lm_head.weight": ("BF16", (vocabulary, hidden)),
        "model.norm.weight": ("BF16", (hidden,)),
    }
    for index in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = ("BF16", (hidden,))
        if "num_experts" in sizes:
            tensors[f"{prefix}.mlp.gate.weight"] = ("BF16", (sizes["num_experts"], hidden))
            for norm in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{norm}.weight"] = ("BF16", (sizes["head_dim"],))
        for name, out, width in _linears(sizes):
            tensors |= {
                f"{prefix}.{name}.{key}": value for key, value in _quantized(preset, out, width).items()
            }
    return tensors


def _linears(sizes: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    hidden, width = sizes["hidden_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * width, sizes["num_key_value_heads"] * width
    yield from (("self_attn.q_proj", queries, hidden), ("self_attn.o_proj", hidden, queries))
    yield from (("self_attn.k_proj", keys, hidden), ("self_attn.v_proj", keys, hidden))
    inner = sizes.get("moe_intermediate_size", sizes["intermediate_size"])
    places = [f"mlp.experts.{expert}" for expert in range(sizes.get("num_experts", 0))] or ["mlp"]
    for place in places:
        yield from ((f"{place}.{part}_proj", inner, hidden) for part in ("gate", "up"))
        yield f"{place}.down_proj", hidden, inner


def _quantized(preset: str, out: int, width: int) -> dict[str, Tensor]:
    """What compressed-tensors stores of a linear layer."""
    if preset == "FP8_DYNAMIC":
        return {"weight": ("F8_E4M3", (out, width)), "weight_scale": ("BF16", (out, 1))}
    if preset == "FP8_BLOCK":
        blocks = (-(-out // 128), -(-width // 128))
        return {"weight": ("F8_E4M3", (out, width)), "weight_scale": ("BF16", blocks)}
    if preset == "W4A16":
        return {
            "weight_packed": ("I32", (out, width // 8)),
            "weight_scale": ("BF16", (out, width // 128)),
            "weight_shape": ("I64", (2,)),
        }
    return {
        "weight_packed": ("U8", (out, width // 2)),
        "weight_scale": ("F8_E4M3", (out, width // 16)),
        "weight_global_scale": ("F32", (1,)),
        **({"input_global_scale": ("F32", (1,))} if preset == "NVFP4" else {}),
    }
