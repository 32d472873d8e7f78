"""config.json beside its quantization_config."""

from collections.abc import Iterator

from tests.mutations.edits import WHOLE, Change, config, without
from tests.mutations.good import Sound


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Sizes, names, switches."""
    yield "a layer more than there is", config(WHOLE, num_hidden_layers=sound.layers + 1)
    if sound.layers > 1:
        yield "a layer less than there is", config(WHOLE, num_hidden_layers=sound.layers - 1)
    yield "another hidden size", config(WHOLE, hidden_size=256)
    yield "another intermediate size", config(WHOLE, intermediate_size=512)
    yield "a smaller intermediate size", config(WHOLE, intermediate_size=64)
    yield "another vocabulary", config(WHOLE, vocab_size=320)
    yield "a vocabulary larger by one", config(WHOLE, vocab_size=385)
    yield "twice the heads", config(WHOLE, num_attention_heads=8)
    yield "half the heads", config(WHOLE, num_attention_heads=2)
    yield "other heads of keys", config(WHOLE, num_key_value_heads=2)
    yield "another head size", config(WHOLE, head_dim=64)
    yield "no head size", without(WHOLE, "head_dim")
    yield "no heads of keys", without(WHOLE, "num_key_value_heads")
    yield "no hidden size", without(WHOLE, "hidden_size")
    yield "no vocabulary", without(WHOLE, "vocab_size")
    yield "no number of layers", without(WHOLE, "num_hidden_layers")
    yield "hidden size a string", config(WHOLE, hidden_size="128")
    yield "unknown architecture", config(WHOLE, architectures=["NoSuchForCausalLM"])
    yield "no architecture", without(WHOLE, "architectures")
    yield "architectures empty", config(WHOLE, architectures=[])
    yield "architecture of another model", config(WHOLE, architectures=["OPTForCausalLM"])
    yield "no model type", without(WHOLE, "model_type")
    yield "unknown model type", config(WHOLE, model_type="no_such_model")
    yield "tied in the config", config(WHOLE, tie_word_embeddings=True)
    yield "untied in the config", config(WHOLE, tie_word_embeddings=False)
    yield "biases of attention in the config", config(WHOLE, attention_bias=True)
    yield "biases of MLPs in the config", config(WHOLE, mlp_bias=True)
    yield "unknown activation", config(WHOLE, hidden_act="no_such_act")
    yield "unknown dtype", config(WHOLE, dtype="float12")
    yield "older name of dtype", config(WHOLE, torch_dtype="bfloat16")
    yield "unknown key in the config", config(WHOLE, no_such_key=1)
    yield "another version of transformers", config(WHOLE, transformers_version="4.40.0")
