"""The attention layers that get scales for the KV cache, from names and shapes alone."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from vexport.formats.kv_cache import KV_CACHES
from vexport.layers.linears import Names
from vexport.records import AttentionLayer, Finding, Json, KvCache, LinearPlan

KEYS = "k_proj"
# Queries, keys and values in one weight on disk.
FUSED = frozenset({"qkv_proj", "query_key_value", "Wqkv", "W_pack", "c_attn", "wqkv", "qkv"})
# vLLM makes no scales for multi-head latent attention: CompressedTensorsConfig.get_quant_method knows only
# its class Attention.
LATENT = "kv_a_proj_with_mqa"


def attention_layers(
    linears: Iterable[LinearPlan], names: Names, text: Mapping[str, Json], kv_cache: KvCache | None
) -> tuple[AttentionLayer, ...]:
    """The decoder's attention layers with scales of their own, by the language model's config `text`."""
    if kv_cache is None:
        return ()
    per_head = KV_CACHES[kv_cache].strategy == "attn_head"
    return tuple(
        AttentionLayer(
            name=linear.name.rpartition(".")[0], heads=kv_heads(linear, text) if per_head else None
        )
        for linear in linears
        if makes_keys(linear.name, names)
    )


def makes_keys(linear: str, names: Names) -> bool:
    """Return whether a linear layer makes the keys of an attention layer of the decoder."""
    last_part = linear.rpartition(".")[2]
    return (last_part == KEYS or last_part in FUSED) and names.in_decoder(linear)


def kv_heads(linear: LinearPlan, text: Mapping[str, Json]) -> int:
    """Return the number of KV heads of an attention layer: by the rows of its keys, or else as the config
    says.
    """
    heads = _heads_of_keys(linear, text) if linear.name.endswith(KEYS) else None
    return heads or _heads(text)


def _heads_of_keys(keys: LinearPlan, text: Mapping[str, Json]) -> int | None:
    size = text.get("head_dim")
    if not isinstance(size, int):
        hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
        size = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else 0
    return keys.out_features // size if size and keys.out_features % size == 0 else None


def _heads(text: Mapping[str, Json]) -> int:
    for key in ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head"):
        heads = text.get(key)
        if isinstance(heads, int):
            return heads
    return 1


def refused_caches(layers: Sequence[AttentionLayer], linears: Iterable[LinearPlan]) -> Iterator[Finding]:
    """Return why vLLM would read no scale of the KV cache, where it would not."""
    latent = next((linear.name for linear in linears if linear.name.endswith(f".{LATENT}")), None)
    if latent or not layers:
        yield Finding(
            check="kv_cache",
            severity="error",
            where=latent.rpartition(".")[0] if latent else "KV cache",
            expected="attention layers for which vLLM reads scales of compressed-tensors",
            got="multi-head latent attention" if latent else "no layer with its own keys and values",
            fix="leave the KV cache in the model's dtype",
        )
