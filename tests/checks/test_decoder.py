"""The tensors of plain decoders are those that vLLM's classes build, by their config."""

import pytest

from vexport.architectures import architecture_table
from vexport.architectures.decoders import decoders
from vexport.checks.vllm.decoder import layout_of
from vexport.types import Json

SIZES: dict[str, Json] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_experts": 2,
    "vocab_size": 256,
}
ATTENTION, MLP = "self_attn.{}_proj.bias", "mlp.{}_proj.bias"


def parameters(name: str, **config: Json) -> set[str]:
    """The parameters of the first layer that are no weights of linear layers, without its number."""
    layout = layout_of(name, {**SIZES, **config}, tensors=10_000)
    assert layout is not None
    return {parameter.removeprefix("model.layers.0.") for parameter in layout.parameters}


@pytest.mark.parametrize(
    ("name", "attention", "mlp"),
    [
        ("LlamaForCausalLM", "qkvo", True),
        ("MistralForCausalLM", "qkvo", True),
        ("Gemma2ForCausalLM", "qkvo", False),
        ("Gemma3ForCausalLM", "qkvo", False),
        ("Qwen3ForCausalLM", "qkv", False),
        ("GemmaForCausalLM", "", False),
    ],
)
def test_biases_are_there_where_the_config_announces_them(name: str, attention: str, mlp: bool) -> None:
    announced = parameters(name, attention_bias=True, mlp_bias=True) - parameters(name)
    expected = {ATTENTION.format(projection) for projection in attention}
    assert announced == expected | {MLP.format(part) for part in ("gate", "up", "down") if mlp}


def test_what_a_class_always_has_needs_no_config() -> None:
    assert {ATTENTION.format(projection) for projection in "qkv"} < parameters("Qwen2ForCausalLM")
    assert {"self_attn.q_norm.weight", "self_attn.k_norm.weight"} < parameters("Qwen3ForCausalLM")
    assert "pre_feedforward_layernorm.weight" in parameters("Gemma2ForCausalLM")


def test_every_decoder_is_a_class_of_the_large_table() -> None:
    table = architecture_table()
    for name, decoder in decoders().items():
        assert decoder.experts == (table.architectures[name].experts or ())
