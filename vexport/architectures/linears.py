"""The linear layers of a checkpoint, and which of them vLLM can run quantized, by names and shapes
alone.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vexport.architectures import STACK, Architecture
from vexport.architectures.config import head_width, known_size, text_config
from vexport.architectures.fusion import moe_layer
from vexport.architectures.stored import Headers
from vexport.records import (
    FLOATING,
    AttentionLayer,
    Finding,
    Json,
    LinearPlan,
    TensorInfo,
    WeightPart,
)

# decoder: quantized by a rule for all linear layers; outside: only by a rule that names it
# (lm_head, vision towers, layers that predict further tokens, routers, gates); unquantizable: vLLM
# builds it without a config, or as experts of the class's own.
Place = Literal["decoder", "outside", "unquantizable"]

# Layers that predict tokens further ahead; transformers drops them, vLLM drafts with them.
# The drafter of these (ErnieMTP, MiMoMTP) asks for them as decoder layers behind the last one.
RENUMBERED = re.compile(r"(?:^|\.)(?:mtp_block|mtp_layers)\.(\d+)\.")
PREDICTION = re.compile(r"(?:^|\.)(?:mtp|nextn|mtp_\w+)\b")
SMALL_BUT_DECISIVE = re.compile(
    r"(?:.*\.)?(?:\w*router\w*(?:\.layer)?|\w*gate|\w*norm\w*|\w*conv1d\w*|\w+_coefs|in_proj_(?:ba|b|a))$"
)
# vLLM's own endings of tensors that hold all experts of a layer
# (RoutedExperts.build_expert_params_mapping).
STACKED_EXPERTS: Mapping[str, str] = {
    name: name for name in ("experts.gate_up_proj", "experts.down_proj")
}
# Loads experts in its own names and none in compressed-tensors'
# (vllm/model_executor/models/gpt_oss.py).
OWN_EXPERTS = frozenset({"GptOssForCausalLM"})
UNNUMBERED = re.compile(r"\bexperts\.(?!\d+\.)")
KEYS = "k_proj"
HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")
# Queries, keys and values in one weight on disk.
FUSED = frozenset({"qkv_proj", "query_key_value", "Wqkv", "W_pack", "c_attn", "wqkv", "qkv"})
# vLLM makes no scales for multi-head latent attention: CompressedTensorsConfig.get_quant_method
# knows only its class Attention.
LATENT = "kv_a_proj_with_mqa"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The reading of one checkpoint's names: vLLM's class, the language model's config and the
    number of its decoder layers.

    `experts_known` says whether vLLM loads the class's experts one by one, `transposed_experts`
    whether a tensor of all experts is (experts, in, out) in this checkpoint.
    """

    architecture: Architecture
    text: Mapping[str, Json]
    layers: int | None
    experts_known: bool
    transposed_experts: bool

    def place(self, module: str) -> Place:
        """Return the place of a linear layer of that name."""
        last_part = module.rpartition(".")[2]
        routed = moe_layer(module) is not None
        kept = (*self.architecture.unquantized, *self.architecture.routers)
        plain = (
            last_part in kept
            or self.architecture.kind(module) == "plain"
            or bool(RENUMBERED.search(module))
        )
        if self.architecture.experts is None if routed else plain:
            return "unquantizable"
        return (
            "decoder"
            if self.in_decoder(module) and not SMALL_BUT_DECISIVE.match(module)
            else "outside"
        )

    def in_decoder(self, module: str) -> bool:
        """Return whether a module is part of a decoder layer of the language model."""
        name = self.vllm_name(module)
        stack = STACK.search(name)
        if stack is None or PREDICTION.search(name) or not self._in_language_model(name):
            return False
        return self.layers is None or int(stack[1]) < self.layers

    def draft_layer(self, module: str) -> str | None:
        """The layer that predicts further tokens that a module is part of, None for other
        modules.
        """
        name, stack = self.vllm_name(module), RENUMBERED.search(module) or STACK.search(module)
        if stack is None or self.in_decoder(module):
            return None
        drafts = PREDICTION.search(name) or self._in_language_model(name)
        return module[: stack.end() - 1] if drafts else None

    def drafter_names(self, draft_layer: str) -> tuple[str, ...]:
        """The names of such a layer in the file, and where vLLM's drafter numbers it on."""
        match = RENUMBERED.search(f"{draft_layer}.")
        if match is None or self.layers is None:
            return (draft_layer,)
        before = draft_layer[: match.start()]
        return draft_layer, f"{before}{'.' if before else ''}layers.{self.layers + int(match[1])}"

    def _in_language_model(self, vllm_name: str) -> bool:
        inside = self.architecture.language_model
        return not inside or vllm_name.startswith(tuple(f"{attribute}." for attribute in inside))

    def vllm_name(self, module: str) -> str:
        """vLLM's name of a module."""
        return self.architecture.vllm_name(module)


def names_of(index: Headers, architecture: Architecture) -> Names:
    """Return how the names of a checkpoint are read."""
    text = text_config(index.config)
    layers = text.get("num_hidden_layers")
    return Names(
        architecture=architecture,
        text=text,
        layers=layers if isinstance(layers, int) else None,
        experts_known=architecture.experts is not None and index.architecture not in OWN_EXPERTS,
        transposed_experts=_is_transposed(index, architecture, text.get("hidden_size")),
    )


def _is_transposed(index: Headers, architecture: Architecture, hidden: Json) -> bool:
    """Return whether tensors of all experts are (experts, in, out): by hidden_size, or as the class
    has them.

    Checkpoints of one class come in both orders: newer versions of transformers save the other one.
    """
    for tensor in index.tensors.values():
        ending = stacked_ending(tensor.name, architecture) if len(tensor.shape) == 3 else None
        _, rows, columns = tensor.shape if ending else (0, 0, 0)
        if ending and rows != columns and hidden in (rows, columns):
            return (rows == hidden) != ending[1].endswith("down_proj")
    return architecture.transposed_experts


def find_linears(index: Headers, names: Names) -> Iterator[LinearPlan]:
    """The linear layers among the tensors, in file order: two-dimensional floating-point weights
    that are no embedding, and the experts of tensors that hold all experts of a layer."""
    for tensor in index.tensors.values():
        module, _, last_part = tensor.name.rpartition(".")
        if tensor.dtype not in FLOATING:
            continue
        if (
            last_part == "weight"
            and len(tensor.shape) == 2
            and not names.architecture.is_table(module)
        ):
            yield _linear(tensor, module, names)
        elif len(tensor.shape) == 3 and names.experts_known:
            yield from _stacked_experts(tensor, names)


def _linear(tensor: TensorInfo, module: str, names: Names) -> LinearPlan:
    """The layer of a two-dimensional weight: (out, in), or (in, out) where the class stores it
    so.
    """
    turned = names.architecture.reordered.get(module.rpartition(".")[2]) == "transposed"
    rows, columns = tensor.shape[::-1] if turned else tensor.shape
    part = WeightPart(expert=0, transposed=True, start=0, stop=rows) if turned else None
    return LinearPlan(
        name=module, weight=tensor.name, out_features=rows, in_features=columns, part=part
    )


def is_unknown_experts(tensor: TensorInfo, names: Names) -> bool:
    """Return whether a tensor holds experts in a way that is not understood: they are copied as
    they are.
    """
    if names.architecture.experts is None or tensor.dtype not in FLOATING or "conv" in tensor.name:
        return False
    together = len(tensor.shape) == 2 and UNNUMBERED.search(tensor.name)
    if len(tensor.shape) != 3 and not together:
        return False
    understood = names.experts_known and stacked_ending(tensor.name, names.architecture) is not None
    return names.in_decoder(tensor.name.removesuffix(".weight")) and not understood


def stacked_ending(name: str, architecture: Architecture) -> tuple[str, str] | None:
    """(ending on disk, vLLM's ending) of a tensor that holds all experts of a layer."""
    endings = {**STACKED_EXPERTS, **architecture.stacked_experts}
    return next(((old, new) for old, new in endings.items() if name.endswith(old)), None)


def _stacked_experts(tensor: TensorInfo, names: Names) -> Iterator[LinearPlan]:
    """Gate and up, or down, of each expert: gate rows first, as `RoutedExperts.load_weights` cuts
    them.
    """
    ending = stacked_ending(tensor.name, names.architecture)
    if ending is None or names.architecture.experts is None or 0 in tensor.shape:
        return
    old, new = ending
    base, _, kind = (tensor.name.removesuffix(old) + new).rpartition(".")
    gate, down, up = names.architecture.experts
    transposed = names.transposed_experts
    experts, rows, columns = (
        tensor.shape[0],
        *(tensor.shape[:0:-1] if transposed else tensor.shape[1:]),
    )
    parts = (down,) if kind == "down_proj" else (gate, up) if up else (gate,)
    height = rows // len(parts)
    for expert in range(experts):
        for position, part in enumerate(parts):
            start = position * height
            yield LinearPlan(
                name=f"{base}.{expert}.{part}",
                weight=tensor.name,
                out_features=height,
                in_features=columns,
                part=WeightPart(
                    expert=expert, transposed=transposed, start=start, stop=start + height
                ),
            )


def attention_layers(
    rows: Mapping[str, int | None], names: Names, *, per_head: bool
) -> tuple[AttentionLayer, ...]:
    """Return the decoder's attention layers, which may get scales of the KV cache.

    `rows` has the out_features of each linear layer, None for unknown ones. With `per_head` each
    KV head has its own scales.
    """
    return tuple(
        AttentionLayer(
            name=linear.rpartition(".")[0],
            heads=kv_heads(linear, out_features, names.text) if per_head else None,
        )
        for linear, out_features in rows.items()
        if makes_keys(linear, names)
    )


def makes_keys(linear: str, names: Names) -> bool:
    """Return whether a linear layer makes the keys of an attention layer of the decoder."""
    last_part = linear.rpartition(".")[2]
    return (last_part == KEYS or last_part in FUSED) and names.in_decoder(linear)


def kv_heads(linear: str, out_features: int | None, text: Mapping[str, Json]) -> int:
    """Return the number of KV heads of the attention layer with this linear layer.

    The number comes from the rows of the keys if these are known and stored alone, and otherwise
    from the config.
    """
    width = head_width(text) if linear.endswith(KEYS) else 0
    if width and out_features and out_features % width == 0:
        return out_features // width
    return next((heads for key in HEADS if (heads := known_size(key, text))), 1)


def refused_caches(layers: Sequence[AttentionLayer], linears: Iterable[str]) -> Iterator[Finding]:
    """Yield a refusal if vLLM would read no scale of the KV cache."""
    latent = next((linear for linear in linears if linear.endswith(f".{LATENT}")), None)
    if latent or not layers:
        yield Finding(
            check="kv_cache",
            severity="error",
            where=latent.rpartition(".")[0] if latent else "KV cache",
            expected="attention layers for which vLLM reads scales of compressed-tensors",
            got="multi-head latent attention"
            if latent
            else "no layer with its own keys and values",
            fix="leave the KV cache in the model's dtype",
        )
