"""Find the linear layers of a checkpoint by name and shape, and decide which can be quantized."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vexport.architectures import NUMBERED_LAYER, Architecture
from vexport.architectures.config import KEYS as KEY_ROWS
from vexport.architectures.config import head_width, known_size, text_config
from vexport.architectures.fusion import FusedLayer, moe_layer
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

# decoder: a rule for all linear layers also applies to this layer. outside: only a rule with the
# layer's name applies to it (lm_head, vision towers, layers that predict further tokens, routers,
# gates). unquantizable: the layer always stays unquantized. Either vLLM builds it without a
# quantization config, or it is in `Architecture.routers` or a RENUMBERED layer, or it belongs to
# experts with unknown names. tower: part of a tower of pictures or its projector, if the plan
# includes them. A rule for all linear layers applies to it.
Place = Literal["decoder", "tower", "outside", "unquantizable"]

# Names of layers that predict further tokens. transformers drops these layers, and vLLM uses them
# for speculative decoding. vLLM's classes ErnieMTP and MiMoMTP rename RENUMBERED layers: their
# numbers continue after the last decoder layer.
RENUMBERED = re.compile(r"(?:^|\.)(?:mtp_block|mtp_layers)\.(\d+)\.")
PREDICTION = re.compile(r"(?:^|\.)(?:mtp|nextn|mtp_\w+)\b")
SENSITIVE_LAYERS = re.compile(
    r"(?:.*\.)?(?:\w*router\w*(?:\.layer)?|\w*gate(?:\.wg)?|\w*norm\w*|\w*conv1d\w*|\w+_coefs|in_proj_(?:ba|b|a))$"
)
# vLLM's endings of tensors that hold all experts of a layer
# (RoutedExperts.build_expert_params_mapping).
STACKED_EXPERTS: Mapping[str, str] = {
    name: name for name in ("experts.gate_up_proj", "experts.down_proj")
}
# Classes that load experts under other names than compressed-tensors
# uses (vllm/model_executor/models/gpt_oss.py).
CUSTOM_EXPERTS = frozenset({"GptOssForCausalLM"})
UNNUMBERED = re.compile(r"\bexperts\.(?!\d+\.)")
# Parts for sound in vLLM's names of modules, beside the parts for pictures.
SOUND = re.compile(r"audio|speech|whisper")
KEYS = "k_proj"
HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")
# Names of layers that store queries, keys and values in a single weight.
FUSED = frozenset({"qkv_proj", "query_key_value", "Wqkv", "W_pack", "c_attn", "wqkv", "qkv"})
# Names of linear layers that vLLM may merge into the input layer of attention with a KV cache.
ATTENTION_PARTS = frozenset({"q_proj", KEYS, "v_proj", *FUSED})
# vLLM makes no scales for multi-head latent attention, because
# CompressedTensorsConfig.get_quant_method handles only the class Attention.
LATENT = "kv_a_proj_with_mqa"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Facts that are needed to interpret the names of a checkpoint.

    `text` is the config of the language model, `layers` the number of its decoder
    layers. `experts_known` is True if vLLM can load each expert of the class
    separately. `transposed_experts` is True if tensors of all experts are (experts, in,
    out) in this checkpoint.
    """

    architecture: Architecture
    text: Mapping[str, Json]
    layers: int | None
    experts_known: bool
    transposed_experts: bool

    def place(self, module: str) -> Place:
        """Return the place of the linear layer with this name."""
        if self._is_unquantizable(module):
            return "unquantizable"
        if SENSITIVE_LAYERS.match(module) or not self.in_decoder(module):
            return "outside"
        return "decoder"

    def in_tower(self, module: str) -> bool:
        """Return True if vLLM can load a module beside the language model quantized.

        Such modules are the linear layers of towers and projectors. vLLM looks up their names in
        the quantization config.
        """
        return self.is_beside(module) and self.architecture.kind(module) == "linear"

    def is_beside(self, module: str) -> bool:
        """Return True if a module is beside the language model: in a tower or a projector."""
        name = self.vllm_name(module)
        return bool(self.architecture.language_model) and not self._in_language_model(name)

    def place_with_tower(self, module: str) -> Place:
        """Return the place of a linear layer in a plan that includes the tower of pictures."""
        place = self.place(module)
        if place != "outside" or SENSITIVE_LAYERS.match(module) or not self.in_tower(module):
            return place
        return "outside" if SOUND.search(self.vllm_name(module)) else "tower"

    def _is_unquantizable(self, module: str) -> bool:
        architecture = self.architecture
        if moe_layer(module) is not None:
            return architecture.experts is None
        kept = (*architecture.unquantized, *architecture.routers)
        if module.rpartition(".")[2] in kept or architecture.kind(module) == "plain":
            return True
        return RENUMBERED.search(module) is not None

    def in_decoder(self, module: str) -> bool:
        """Return True if a module is part of a decoder layer of the language model."""
        name = self.vllm_name(module)
        stack = NUMBERED_LAYER.search(name)
        if stack is None or PREDICTION.search(name) or not self._in_language_model(name):
            return False
        return self.layers is None or int(stack[1]) < self.layers

    def draft_layer(self, module: str) -> str | None:
        """Return the name of the layer that predicts further tokens around a module, or None."""
        name = self.vllm_name(module)
        stack = RENUMBERED.search(module) or NUMBERED_LAYER.search(module)
        if stack is None or self.in_decoder(module):
            return None
        drafts = PREDICTION.search(name) or self._in_language_model(name)
        return module[: stack.end() - 1] if drafts else None

    def drafter_names(self, draft_layer: str) -> tuple[str, ...]:
        """Return the names of a layer that predicts further tokens.

        They are its name in the file, and its name in vLLM's drafter if it differs.
        """
        match = RENUMBERED.search(f"{draft_layer}.")
        if match is None or self.layers is None:
            return (draft_layer,)
        before = draft_layer[: match.start()]
        return draft_layer, f"{before}{'.' if before else ''}layers.{self.layers + int(match[1])}"

    def _in_language_model(self, vllm_name: str) -> bool:
        inside = self.architecture.language_model
        return not inside or vllm_name.startswith(tuple(f"{attribute}." for attribute in inside))

    def vllm_name(self, module: str) -> str:
        """Return vLLM's name of a module."""
        return self.architecture.vllm_name(module)


def names_of(index: Headers, architecture: Architecture) -> Names:
    """Return the facts that are needed to interpret the names of a checkpoint."""
    text = text_config(index.config)
    layers = text.get("num_hidden_layers")
    return Names(
        architecture=architecture,
        text=text,
        layers=layers if isinstance(layers, int) else None,
        experts_known=architecture.experts is not None and index.architecture not in CUSTOM_EXPERTS,
        transposed_experts=_is_transposed(index, architecture, text.get("hidden_size")),
    )


def _is_transposed(index: Headers, architecture: Architecture, hidden: Json) -> bool:
    """Return True if tensors of all experts are (experts, in, out).

    Checkpoints of one class exist in both orders, because transformers changed the order. The
    hidden_size decides. If both sides are equal, the order of the class's table is used.
    """
    for tensor in index.tensors.values():
        ending = stacked_ending(tensor.name, architecture) if len(tensor.shape) == 3 else None
        _, rows, columns = tensor.shape if ending else (0, 0, 0)
        if ending and rows != columns and hidden in (rows, columns):
            return (rows == hidden) != ending[1].endswith("down_proj")
    return architecture.transposed_experts


def find_linears(index: Headers, names: Names) -> Iterator[LinearPlan]:
    """Yield the linear layers among the tensors, in file order.

    These are the two-dimensional floating-point weights except embeddings, and each expert in a
    tensor that holds all experts of a layer.
    """
    for tensor in index.tensors.values():
        module, _, last_part = tensor.name.rpartition(".")
        if tensor.dtype not in FLOATING:
            continue
        if (
            last_part == "weight"
            and len(tensor.shape) == 2
            and not names.architecture.is_embedding(module)
        ):
            yield _linear(tensor, module, names)
        elif len(tensor.shape) == 3 and names.experts_known:
            yield from _stacked_experts(tensor, names)


def _linear(tensor: TensorInfo, module: str, names: Names) -> LinearPlan:
    """Return the layer of a two-dimensional weight, which some classes store as (in, out)."""
    transposed = names.architecture.reordered.get(module.rpartition(".")[2]) == "transposed"
    rows, columns = tensor.shape[::-1] if transposed else tensor.shape
    part = WeightPart(expert=0, transposed=True, start=0, stop=rows) if transposed else None
    return LinearPlan(
        name=module, weight=tensor.name, out_features=rows, in_features=columns, part=part
    )


def is_unknown_experts(tensor: TensorInfo, names: Names) -> bool:
    """Return True if a tensor has experts in an unknown format. Such tensors are copied."""
    if names.architecture.experts is None or tensor.dtype not in FLOATING or "conv" in tensor.name:
        return False
    is_merged_matrix = len(tensor.shape) == 2 and UNNUMBERED.search(tensor.name)
    if len(tensor.shape) != 3 and not is_merged_matrix:
        return False
    is_known = names.experts_known and stacked_ending(tensor.name, names.architecture) is not None
    return names.in_decoder(tensor.name.removesuffix(".weight")) and not is_known


def stacked_ending(name: str, architecture: Architecture) -> tuple[str, str] | None:
    """Return the ending of a stacked tensor's name in the file, and vLLM's ending for it.

    A stacked tensor holds all experts of a layer. Returns None for other tensors.
    """
    endings = {**STACKED_EXPERTS, **architecture.stacked_experts}
    return next(((old, new) for old, new in endings.items() if name.endswith(old)), None)


def _stacked_experts(tensor: TensorInfo, names: Names) -> Iterator[LinearPlan]:
    """Yield the gate and up projections, or the down projection, of each expert.

    The rows of the gate come first, as in `RoutedExperts.load_weights`.
    """
    ending = stacked_ending(tensor.name, names.architecture)
    if ending is None or names.architecture.experts is None or 0 in tensor.shape:
        return
    old, new = ending
    base, _, kind = (tensor.name.removesuffix(old) + new).rpartition(".")
    transposed = names.transposed_experts
    experts, *sides = tensor.shape
    rows, columns = reversed(sides) if transposed else sides
    gate, down, up = names.architecture.experts
    inner = [gate, up] if up else [gate]
    parts = [down] if kind == "down_proj" else inner
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
    layers: Iterable[FusedLayer],
    rows: Mapping[str, int | None],
    names: Names,
    *,
    per_head: bool,
    queries: bool = False,
) -> tuple[AttentionLayer, ...]:
    """Return the attention layers of the decoder, for which KV cache scales can be stored.

    `rows` has the out_features of each linear layer, or None if they are unknown. With `per_head`,
    each KV head has a separate scale. With `queries`, queries have a scale.
    """
    return tuple(
        AttentionLayer(
            name=linear.rpartition(".")[0],
            heads=kv_heads(linear, rows[linear], names.text) if per_head else None,
            has_query_scale=queries,
        )
        for linear in key_projections(layers, names)
    )


def key_projections(layers: Iterable[FusedLayer], names: Names) -> Iterator[str]:
    """Yield the linear layers of the decoder that output the keys of attention with a KV cache."""
    for layer in layers:
        if is_attention(layer, names.architecture):
            yield from (member for member in layer.members if is_key_projection(member, names))


def is_key_projection(linear: str, names: Names) -> bool:
    """Return True if a linear layer of the decoder outputs the keys of an attention layer."""
    last_part = linear.rpartition(".")[2]
    return (last_part == KEYS or last_part in FUSED) and names.in_decoder(linear)


def is_attention(layer: FusedLayer, architecture: Architecture) -> bool:
    """Return True if the layer with a key projection belongs to attention with a KV cache.

    vLLM merges the keys of linear attention with further projections, or into parts of other sizes
    than the keys of its attention layers have.
    """
    parts = architecture.parts.get(layer.projection)
    if parts is not None and len(layer.members) > 1:
        return KEY_ROWS in parts
    return {member.rpartition(".")[2] for member in layer.members} <= ATTENTION_PARTS


def kv_heads(linear: str, out_features: int | None, text: Mapping[str, Json]) -> int:
    """Return the number of KV heads of the attention layer that contains a key projection.

    It is the out_features of `k_proj` divided by the width of a head. If the keys are not stored
    separately, or if one of the sizes is unknown, it is the number in the config, or 1.
    """
    width = head_width(text) if linear.endswith(KEYS) else 0
    if width and out_features and out_features % width == 0:
        return out_features // width
    return next((heads for key in HEADS if (heads := known_size(key, text))), 1)


def refused_caches(layers: Sequence[AttentionLayer], linears: Iterable[str]) -> Iterator[Finding]:
    """Yield an error if vLLM would not read any scale of the KV cache."""
    latent = next((linear for linear in linears if linear.endswith(f".{LATENT}")), None)
    if latent or not layers:
        yield Finding(
            check="kv_cache",
            claim="precision",
            severity="error",
            where=latent.rpartition(".")[0] if latent else "KV cache",
            expected="attention layers for which vLLM loads KV cache scales",
            got="multi-head latent attention"
            if latent
            else "no attention layer with keys and values",
            fix="keep the KV cache in the model's dtype",
        )
