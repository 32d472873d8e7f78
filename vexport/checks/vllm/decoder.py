"""What tensors a plain decoder has, and how large they are, from its config.json.

For a class that is not listed only what its tensors say of each other can be checked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from vexport.architectures.decoders import Decoder, decoders
from vexport.architectures.text_config import text_config
from vexport.types import Json

# Gate, down and up of an MLP that is not one of experts.
DENSE = ("gate_proj", "down_proj", "up_proj")
# Keys of which each unit has tensors of its own, so that there are at most as many as tensors.
COUNTS = ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts")
# Experts that a config may announce beyond those that are stored: of layers without any, or missing.
SLACK, LEAST_SLACK = 16, 4096
# Keys without which transformers would build a model of its default size.
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The modules of a model: linear layers and embeddings (rows, columns), other parameters by name.

    `optional` are names that may be there; a bias that is not among the parameters is never loaded.
    """

    linears: dict[str, tuple[int, int]]
    tables: dict[str, tuple[int, int]]
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()


def layout_of(class_name: str, config: Mapping[str, Json], *, tensors: int) -> Layout | None:
    """The layout of a model, None where its class is not listed or its config lacks a size.

    Nor is there one where the config asks for more than could be among so many tensors.
    """
    decoder = decoders().get(class_name)
    if decoder is None or impossible_size(config, tensors) or missing_sizes(class_name, config):
        return None
    linears: dict[str, tuple[int, int]] = {}
    parameters: dict[str, tuple[int, ...]] = {}
    for number in range(_int(config, "num_hidden_layers")):
        prefix = f"model.layers.{number}."
        for name, shape in _linears(decoder, config, number):
            linears[prefix + name] = shape
        for name, size in _parameters(decoder, config):
            parameters[prefix + name] = (size,)
    hidden, vocabulary = _int(config, "hidden_size"), _int(config, "vocab_size")
    tables = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
    tied = config.get("tie_word_embeddings", decoder.tied)
    return Layout(
        linears=linears,
        tables=tables,
        parameters={**parameters, "model.norm.weight": (hidden,)},
        optional=frozenset({"lm_head"} if tied else ()),
    )


def impossible_size(config: Mapping[str, Json], tensors: int) -> tuple[str, str] | None:
    """A key whose number no checkpoint of so many tensors can have, and what it is; None where all may be.

    What is looked at for each layer and expert is bounded by it: a file decides, not a number in it.
    """
    text = text_config(config)
    for where in (config, text):
        for key in COUNTS:
            if _int(where, key) > max(tensors, 1):
                return key, f"{_int(where, key):.6g} in a checkpoint of {tensors:,} tensors"
    if _int(config, "num_hidden_layers") * _experts(config) > SLACK * tensors + LEAST_SLACK:
        return "num_hidden_layers", f"more experts in its layers than the checkpoint's {tensors:,} tensors"
    return None


def missing_sizes(class_name: str, config: Mapping[str, Json]) -> list[str]:
    """The sizes that a config does not give, or not as a number."""
    decoder = decoders()[class_name]
    sizes = [key for key in SIZES if _int(config, key) < 1]
    dense = not decoder.experts or (decoder.dense_layers and _has_dense(config))
    if not dense and _int(config, "moe_intermediate_size"):
        sizes = [key for key in sizes if key != "intermediate_size"]
    return sizes


def _linears(
    decoder: Decoder, config: Mapping[str, Json], number: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
    width = head_width(decoder, config)
    usual = heads if "num_key_value_heads" in config else decoder.kv_heads or heads
    keys = (_int(config, "num_key_value_heads") or usual) * width
    yield "self_attn.q_proj", (heads * width, hidden)
    yield "self_attn.k_proj", (keys, hidden)
    yield "self_attn.v_proj", (keys, hidden)
    yield "self_attn.o_proj", (hidden, heads * width)
    if not decoder.experts or (decoder.dense_layers and not _is_sparse(config, number)):
        yield from _mlp(decoder.mlp, DENSE, hidden, _int(config, "intermediate_size"))
        return
    count = _experts(config)
    yield f"{decoder.mlp}.gate", (count, hidden)
    inner = _int(config, "moe_intermediate_size") or _int(config, "intermediate_size")
    for expert in range(count):
        yield from _mlp(f"{decoder.mlp}.experts.{expert}", decoder.experts, hidden, inner)


def head_width(decoder: Decoder, config: Mapping[str, Json]) -> int:
    """Values of one head."""
    given = (_int(config, "head_dim") if decoder.reads_head_dim else 0) or decoder.head_dim
    return given or _int(config, "hidden_size") // _int(config, "num_attention_heads")


def _is_sparse(config: Mapping[str, Json], number: int) -> bool:
    """Whether a layer's MLP is one of experts (Qwen3MoeDecoderLayer)."""
    dense = config.get("mlp_only_layers")
    if isinstance(dense, list) and number in dense:
        return False
    return (number + 1) % (_int(config, "decoder_sparse_step") or 1) == 0


def _has_dense(config: Mapping[str, Json]) -> bool:
    """Whether `_is_sparse` is false for a layer, of which a config may name any number."""
    layers, dense = _int(config, "num_hidden_layers"), config.get("mlp_only_layers")
    named = isinstance(dense, list) and any(isinstance(each, int) and 0 <= each < layers for each in dense)
    return layers > 0 and (named or abs(_int(config, "decoder_sparse_step") or 1) != 1)


def _experts(config: Mapping[str, Json]) -> int:
    return _int(config, "num_experts") or _int(config, "num_local_experts")


def _mlp(
    prefix: str, names: tuple[str, ...], hidden: int, inner: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    gate, down, up = names
    yield f"{prefix}.{gate}", (inner, hidden)
    yield f"{prefix}.{up}", (inner, hidden)
    yield f"{prefix}.{down}", (hidden, inner)


def _parameters(decoder: Decoder, config: Mapping[str, Json]) -> Iterator[tuple[str, int]]:
    """Norms and biases of a layer, by name and size."""
    hidden, width = _int(config, "hidden_size"), head_width(decoder, config)
    for norm in decoder.norms:
        yield f"{norm}.weight", hidden
    if decoder.head_norms:
        yield "self_attn.q_norm.weight", width
        yield "self_attn.k_norm.weight", width
    sizes = {name: shape[0] for name, shape in _linears(decoder, config, 0)}
    biases = {*decoder.biases, *(decoder.configured if config.get("attention_bias") else ())}
    for projection in sorted(biases):
        yield f"self_attn.{projection}_proj.bias", sizes[f"self_attn.{projection}_proj"]
    if decoder.mlp_biases and config.get("mlp_bias"):
        for projection in DENSE:
            yield f"mlp.{projection}.bias", sizes[f"mlp.{projection}"]


def _int(config: Mapping[str, Json], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
