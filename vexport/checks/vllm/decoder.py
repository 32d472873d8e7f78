"""What tensors a plain decoder has, and how large they are, from its config.json.

Sources: the classes' modules in vllm/model_executor/models and the defaults of their configs in transformers.
For a class that is not listed only what its tensors say of each other can be checked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from vexport.types import Json

ATTENTION = ("q", "k", "v", "o")
QKV = ("q", "k", "v")
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
FEEDFORWARD_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
# Keys without which transformers would build a model of its default size.
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A class of decoders, all of whose layers have attention and an MLP in the names of Llama.

    `biases` are the attention's projections that have one, or have one where `attention_bias` says so
    (`configured`); `mlp` is the name of the MLP, `experts` the names of an expert's gate, down and up
    projections, empty where the MLPs are dense; with `dense_layers` the config may name layers without
    experts. `head_dim` and `kv_heads` are what a config without them means, 0 what follows from the other
    sizes; without `given_head_dim` the class reads no head_dim. `silu` says that the MLP's activation can be
    no other, `norms_above_one` that norms multiply by one more than their weight, `sandwiched` that the MLP
    has a norm on either side.
    """

    biases: tuple[str, ...] = ()
    configured: tuple[str, ...] = ()
    mlp_biases: bool = False
    head_norms: bool = False
    mlp: str = "mlp"
    experts: tuple[str, ...] = ()
    dense_layers: bool = False
    head_dim: int = 0
    given_head_dim: bool = True
    kv_heads: int = 0
    tied: bool = False
    silu: bool = True
    norms_above_one: bool = False
    sandwiched: bool = False

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of a decoder layer."""
        return (*LAYER_NORMS, *(FEEDFORWARD_NORMS if self.sandwiched else ()))

    @property
    def norm_before_mlp(self) -> str:
        """The norm that the MLP's inputs come from."""
        return (FEEDFORWARD_NORMS if self.sandwiched else LAYER_NORMS[1:])[0]


GEMMA = Decoder(head_dim=256, kv_heads=16, tied=True, silu=False, norms_above_one=True)
EXPERTS = ("gate_proj", "down_proj", "up_proj")
DECODERS: Mapping[str, Decoder] = {
    "LlamaForCausalLM": Decoder(configured=ATTENTION, mlp_biases=True),
    "MistralForCausalLM": Decoder(kv_heads=8),
    "Qwen2ForCausalLM": Decoder(biases=QKV, kv_heads=32, given_head_dim=False),
    "Qwen3ForCausalLM": Decoder(configured=QKV, head_norms=True, head_dim=128, kv_heads=32),
    "Qwen3MoeForCausalLM": Decoder(
        configured=QKV, head_norms=True, experts=EXPERTS, dense_layers=True, kv_heads=4
    ),
    "MixtralForCausalLM": Decoder(mlp="block_sparse_moe", experts=("w1", "w2", "w3"), kv_heads=8, silu=False),
    "Phi3ForCausalLM": Decoder(configured=ATTENTION, mlp_biases=True),
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": replace(GEMMA, kv_heads=4, sandwiched=True),
    "Gemma3ForCausalLM": replace(GEMMA, kv_heads=4, sandwiched=True, head_norms=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The modules of a model: linear layers and embeddings (rows, columns), other parameters by name.

    `optional` are names that may be there; a bias that is not among the parameters is never loaded.
    """

    linears: dict[str, tuple[int, int]]
    tables: dict[str, tuple[int, int]]
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()


def layout_of(class_name: str, config: Mapping[str, Json]) -> Layout | None:
    """The layout of a model, None where its class is not listed or its config lacks a size."""
    decoder = DECODERS.get(class_name)
    if decoder is None or missing_sizes(class_name, config):
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


def missing_sizes(class_name: str, config: Mapping[str, Json]) -> list[str]:
    """The sizes that a config does not give, or not as a number."""
    decoder = DECODERS[class_name]
    sizes = [key for key in SIZES if _int(config, key) < 1]
    layers = range(_int(config, "num_hidden_layers"))
    dense = not decoder.experts or (decoder.dense_layers and any(not _is_sparse(config, n) for n in layers))
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
        yield from _mlp(decoder.mlp, EXPERTS, hidden, _int(config, "intermediate_size"))
        return
    count = _experts(config)
    yield f"{decoder.mlp}.gate", (count, hidden)
    inner = _int(config, "moe_intermediate_size") or _int(config, "intermediate_size")
    for expert in range(count):
        yield from _mlp(f"{decoder.mlp}.experts.{expert}", decoder.experts, hidden, inner)


def head_width(decoder: Decoder, config: Mapping[str, Json]) -> int:
    """Values of one head."""
    given = (_int(config, "head_dim") if decoder.given_head_dim else 0) or decoder.head_dim
    return given or _int(config, "hidden_size") // _int(config, "num_attention_heads")


def _is_sparse(config: Mapping[str, Json], number: int) -> bool:
    """Whether a layer's MLP is one of experts (Qwen3MoeDecoderLayer)."""
    dense = config.get("mlp_only_layers")
    if isinstance(dense, list) and number in dense:
        return False
    return (number + 1) % (_int(config, "decoder_sparse_step") or 1) == 0


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
        for projection in EXPERTS:
            yield f"mlp.{projection}.bias", sizes[f"mlp.{projection}"]


def _int(config: Mapping[str, Json], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
