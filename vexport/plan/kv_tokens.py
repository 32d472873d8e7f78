"""What the KV cache takes on a rank, from names, shapes and the config; `load --dry` asks vLLM itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vexport.architectures import resolve
from vexport.architectures.text_config import text_config
from vexport.checkpoint.index import SourceIndex
from vexport.plan.kv_cache import KEYS, LATENT, kv_heads, makes_keys
from vexport.plan.linears import STACK, Names, find_linears, names_of
from vexport.plan.shapes import query_rows
from vexport.types import Json, LinearPlan

# Bytes of a number in the model's dtype, which vLLM makes of float32 too.
MODEL_BYTES = 2
# Tokens of a block of vLLM's KV cache on a GPU (vllm/config/cache.py).
BLOCK_TOKENS = 16
# Groups of layers that share blocks are as large as the smallest kind, or the largest if that is little more.
_LITTLE_MORE = 1.5
# Names of `layer_types` of layers that attend to a window, and to all tokens; others keep a state instead.
WINDOWED = ("sliding_attention", "chunked_attention")
ATTENTION = (*WINDOWED, "full_attention", "attention")
_WINDOWS = ("sliding_window", "attention_chunk_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayer:
    """One attention layer on one rank: bytes of keys and values of a token, and the tokens that it sees.

    `window` is None where it sees all. `operations` are those of a token of the query for one of the cache.
    """

    token_bytes: int
    operations: int
    window: int | None = None

    def tokens(self, context: int) -> int:
        """How many tokens of a sequence it reads."""
        return context if self.window is None else min(context, self.window)

    def held_tokens(self, context: int, step: int, block: int) -> int:
        """For how many tokens of a sequence vLLM keeps room, in whole blocks.

        Of a window these are its tokens and those of a `step`, and it may begin within a block
        (SlidingWindowSpec in vllm/v1/kv_cache_interface.py).
        """
        if self.window is None:
            return block * -(-context // block)
        return block * (-(-min(self.window - 1 + step, context) // block) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheOfRank:
    """The attention layers that keep keys and values of their own."""

    layers: tuple[KvLayer, ...]

    def read_bytes(self, context: int) -> int:
        """Bytes that one new token of a sequence reads."""
        return sum(layer.token_bytes * layer.tokens(context) for layer in self.layers)

    def held_bytes(self, context: int, step: int, block: int = BLOCK_TOKENS) -> int:
        """Bytes that vLLM keeps for one sequence, which schedules `step` tokens at once.

        Layers with and without a window are in groups of equal size, the last one filled up with layers that
        there are not (_get_kv_cache_groups_uniform_page_size in vllm/v1/core/kv_cache_utils.py).
        """
        kinds: dict[int | None, list[KvLayer]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.window, []).append(layer)
        size, held = _group_size([len(layers) for layers in kinds.values()]), 0
        for layers in kinds.values():
            filled_up = size * -(-len(layers) // size)
            token_bytes = sum(layer.token_bytes for layer in layers) * filled_up // len(layers)
            held += token_bytes * layers[0].held_tokens(context, step, block)
        return held

    def decode_operations(self, context: int) -> int:
        """Operations of the attention of one new token."""
        return sum(layer.operations * layer.tokens(context) for layer in self.layers)

    def prefill_operations(self, context: int) -> int:
        """Operations of the attention over a whole prompt: each token sees those before it, or a window."""
        return sum(
            layer.operations * seen * (2 * context - seen + 1) // 2
            for layer in self.layers
            for seen in (layer.tokens(context),)
        )


def _group_size(numbers: Sequence[int]) -> int:
    least, most = min(numbers, default=1), max(numbers, default=1)
    return most if most < _LITTLE_MORE * least else least


def kv_cache_of(index: SourceIndex, tp: int) -> KvCacheOfRank | None:
    """The KV cache on one of `tp` ranks; None where headers and config do not tell it.

    Without `layer_types` every layer counts as seeing all tokens. States of linear attention are not counted.
    """
    names = names_of(index, resolve(index.architecture, index.config)[0])
    text = text_config(index.config)
    if "linear_attn_config" in text:
        return None
    linears = {one.name: one for one in find_linears(index, names)}
    layers = []
    for linear in linears.values():
        number = _attention_number(linear, names)
        if number is None or not _keeps_own(number, text):
            continue
        layer = _layer(linear, linears, text, tp)
        if layer is None:
            return None
        layers.append(replace(layer, window=_window(number, text)))
    return KvCacheOfRank(layers=tuple(layers)) if layers else None


def _attention_number(linear: LinearPlan, names: Names) -> int | None:
    """The number of the decoder layer whose keys a linear layer makes, None for other layers."""
    latent = linear.name.endswith(f".{LATENT}") and names.in_decoder(linear.name)
    if not (latent or makes_keys(linear.name, names)):
        return None
    stack = STACK.search(linear.name)
    return int(stack[1]) if stack else None


def _keeps_own(number: int, text: Mapping[str, Json]) -> bool:
    """Whether a layer has a cache: no state in its place, and not that of an earlier layer."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and number < len(kinds) and kinds[number] not in ATTENTION:
        return False
    shared, layers = text.get("num_kv_shared_layers"), text.get("num_hidden_layers")
    return not (isinstance(shared, int) and isinstance(layers, int) and shared and number >= layers - shared)


def _window(number: int, text: Mapping[str, Json]) -> int | None:
    kinds = text.get("layer_types")
    if not isinstance(kinds, list) or number >= len(kinds) or kinds[number] not in WINDOWED:
        return None
    size = text.get(_WINDOWS[WINDOWED.index(str(kinds[number]))])
    return size if isinstance(size, int) and size > 0 else None


def _layer(
    linear: LinearPlan, linears: Mapping[str, LinearPlan], text: Mapping[str, Json], tp: int
) -> KvLayer | None:
    """Keys and values by their rows; heads fewer than ranks are repeated, what is latent is on every rank."""
    heads = text.get("num_attention_heads")
    if linear.name.endswith(f".{LATENT}"):
        rank, rows = text.get("kv_lora_rank"), linear.out_features
        if not isinstance(rank, int) or not isinstance(heads, int):
            return None
        return KvLayer(token_bytes=MODEL_BYTES * rows, operations=2 * (heads // tp) * (rows + rank))
    queries = query_rows(text)
    if linear.name.endswith(f".{KEYS}"):
        values = linears.get(f"{linear.name.removesuffix(KEYS)}v_proj", linear)
        rows = linear.out_features + values.out_features
    else:
        rows = linear.out_features - queries
    if rows <= 0 or not queries:
        return None
    parts = min(tp, kv_heads(linear, text))
    return KvLayer(token_bytes=MODEL_BYTES * rows // parts, operations=4 * queries // tp)
