"""A model with custom code whose experts are a plain list of modules, as in older Mixtral code."""

import torch
from torch import nn
from transformers import LlamaForCausalLM, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class Expert(nn.Module):
    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.w2(nn.functional.silu(self.w1(hidden)) * self.w3(hidden))
        return answer


class Mixture(nn.Module):
    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList([Expert(config) for _ in range(config.num_local_experts)])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        hidden = states.flatten(0, -2)
        shares, chosen = torch.softmax(self.gate(hidden).float(), dim=-1).topk(2)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out.index_add_(
                0, token, expert(hidden[token]) * shares[token, place, None].to(hidden.dtype)
            )
        return out.view_as(states)


class PlainMixtral(LlamaForCausalLM):  # type: ignore[misc]
    """Llama with a mixture of experts instead of each MLP."""

    def __init__(self, config: MixtralConfig) -> None:
        config.mlp_bias = config.attention_bias = False
        super().__init__(config)
        for layer in self.model.layers:
            del layer.mlp
            layer.block_sparse_moe = Mixture(config)
            layer.forward = _forward.__get__(layer)


def _forward(self: LlamaDecoderLayer, hidden_states: torch.Tensor, **call: object) -> torch.Tensor:
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **call)
    hidden_states = hidden_states + attended
    answer: torch.Tensor = hidden_states + self.block_sparse_moe(
        self.post_attention_layernorm(hidden_states)
    )
    return answer
