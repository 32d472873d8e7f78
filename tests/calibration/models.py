"""Micro models of several families with random weights, and what a whole-model run sees of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCABULARY = 128
COMMON: Mapping[str, object] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "dtype": "bfloat16"}
# Modules whose name in the checkpoint is another.
RENAMED = {"embed_out": "lm_head"}
LLAMA_LIKE: Mapping[str, object] = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def _config(name: str, **sizes: object) -> transformers.PreTrainedConfig:
    config: transformers.PreTrainedConfig = getattr(transformers, name)(**sizes)
    return config


def configs() -> Mapping[str, transformers.PreTrainedConfig]:
    """A small configuration of each family, chosen for how differently they call their layers."""
    gemma_layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        "llama": _config("LlamaConfig", **LLAMA_LIKE),
        "qwen3": _config("Qwen3Config", **LLAMA_LIKE, head_dim=16),
        "gemma3": _config(
            "Gemma3TextConfig", **LLAMA_LIKE, head_dim=16, sliding_window=8, layer_types=gemma_layers
        ),
        "phi3": _config("Phi3Config", **LLAMA_LIKE),
        "gpt_neox": _config("GPTNeoXConfig", **{**LLAMA_LIKE, "num_key_value_heads": None}, rotary_pct=0.5),
        "gpt2": _config("GPT2Config", **COMMON, n_embd=64, n_layer=3, n_head=4, n_positions=64),
        "opt": _config(
            "OPTConfig",
            **COMMON,
            hidden_size=64,
            ffn_dim=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            word_embed_proj_dim=32,
        ),
        "bloom": _config(
            "BloomConfig", vocab_size=VOCABULARY, dtype="bfloat16", hidden_size=64, n_layer=3, n_head=4
        ),
        "mistral": _config("MistralConfig", **LLAMA_LIKE, sliding_window=8),
    }


def save(config: transformers.PreTrainedConfig, folder: Path) -> Path:
    """A checkpoint of this configuration with weights from a fixed seed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What plain hooks of a whole-model run saw at the input of one layer."""

    low: float
    high: float
    tokens: int
    squares: torch.Tensor


def whole_model_run(folder: Path, names: Sequence[str], batches: Sequence[torch.Tensor]) -> dict[str, Seen]:
    """Load everything, run every batch, watch the inputs of the named layers: the reference."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def watch(name: str) -> None:
        def hook(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            inputs[name].append(args[0].flatten(0, -2).clone())

        model.get_submodule(RENAMED.get(name, name)).register_forward_pre_hook(hook)

    for name in names:
        watch(name)
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch)
    return {name: _seen(torch.cat(values)) for name, values in inputs.items() if values}


def _seen(values: torch.Tensor) -> Seen:
    return Seen(
        low=values.min().item(),
        high=values.max().item(),
        tokens=values.shape[0],
        squares=values.double().square().mean(0).float(),
    )
