"""`quantization_config` of config.json, as vLLM reads it, and scales of the KV cache."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vexport.architectures import Architecture, get_architecture
from vexport.architectures.fusion import (
    ABSENT_UP,
    FusedLayer,
    all_names,
    extra_lookup_entries,
    is_head,
    lookup_names,
    moe_layer,
    patterns_below,
)
from vexport.errors import InputError
from vexport.formats.arguments import QuantArgs, SchemeArgs, arguments_adapter
from vexport.formats.plan import FusionGroup, Plan
from vexport.records import AttentionLayer, HeadRanges, Json, KeyValueRanges, KvCache, TensorSpec
from vexport.rules.quantize import KV_HEADS

if TYPE_CHECKING:
    from vexport.formats.packing.base import Array


# The fp8 KV cache has scales for keys and values, per attention layer or per KV head
# (CompressedTensorsKVCacheMethod in vLLM's compressed_tensors.py). Scales per head need
# FlashAttention 3.
K_SCALE, V_SCALE = "k_scale", "v_scale"
# Scale of the queries, for attention in FP8. vLLM quantizes queries after rotary embedding, if its
# attention backend supports it (Attention.forward in layers/attention/attention.py).
Q_SCALE = "q_scale"
# Name of vLLM's Attention object in a model's attention module (`self_attn.attn`). vLLM also loads
# the scale `self_attn.k_scale` into this object (get_cache_scale_mapper in
# quantization/base_config.py).
INNER = "attn"
KV_CACHES: Mapping[KvCache, QuantArgs] = {
    "fp8": QuantArgs(num_bits=8, type="float", strategy="tensor", observer="static_minmax"),
    "fp8_per_head": QuantArgs(
        num_bits=8, type="float", strategy="attn_head", observer="static_minmax"
    ),
    "fp8_attention": QuantArgs(
        num_bits=8, type="float", strategy="tensor", observer="static_minmax"
    ),
}


def quantization_config(
    plan: Plan, ranges: Mapping[str, KeyValueRanges] | None = None
) -> dict[str, Json]:
    """Return the quantization config of a plan, with a group per scheme and observer.

    `ranges` are the ranges of the attention layers in calibration. If queries have scales, there is
    also a group for each class of attention.

    If there is a single group, it targets the class Linear. Several groups target their layers by
    name. A class would match all layers, and vLLM uses the first target that matches.
    """
    by_scheme: dict[tuple[str, str], list[FusionGroup]] = {}
    for group in plan.groups:
        by_scheme.setdefault((group.scheme.name, group.observers), []).append(group)
    architecture = get_architecture(plan.architecture)
    groups: dict[str, Json] = {}
    formats: set[str] = set()
    for number, same_scheme in enumerate(by_scheme.values()):
        others = [
            group.layer for each in by_scheme.values() if each is not same_scheme for group in each
        ]
        layers = [group.layer for group in same_scheme]
        args = _arguments(same_scheme[0])
        stored_as = same_scheme[0].scheme.format.name
        formats.add(stored_as)
        groups[f"group_{number}"] = {
            "targets": [*targets_of(layers, architecture, others, alone=len(by_scheme) == 1)],
            "weights": _json(args.weights),
            "input_activations": _json(args.input_activations),
            "output_activations": None,
            "format": stored_as,
        }
    for kind in _attention_classes(plan, ranges or {}):
        groups[f"group_{len(groups)}"] = {
            "targets": [kind],
            "weights": None,
            "input_activations": _json(KV_CACHES["fp8_attention"]),
            "output_activations": None,
            "format": None,
        }
    return {
        "config_groups": groups,
        "format": "mixed-precision" if len(formats) > 1 else min(formats, default="dense"),
        "global_compression_ratio": None,
        "ignore": list(plan.ignore),
        "kv_cache_scheme": _json(KV_CACHES[plan.kv_cache]) if plan.kv_cache else None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _attention_classes(plan: Plan, ranges: Mapping[str, KeyValueRanges]) -> Sequence[str]:
    """Return the classes of attention with scales of queries, as transformers names them.

    compressed-tensors describes quantized attention by a group that targets such a class. vLLM
    skips a group with a single target that ends in `Attention` (from_config of
    CompressedTensorsConfig), and reads the scales with the KV cache scheme. It would take another
    name for a linear layer, so other names get no group.
    """
    quantized = [ranges[layer.name].kind for layer in plan.attention if layer.has_query_scale]
    return [kind for kind in dict.fromkeys(quantized) if kind.endswith("Attention")]


def targets_of(
    layers: Sequence[FusedLayer],
    architecture: Architecture,
    others: Iterable[FusedLayer],
    *,
    alone: bool,
) -> list[str]:
    """Return targets that vLLM resolves to these layers and to none of `others`.

    `others` have other schemes. vLLM looks up some fused modules by the names of their members
    (`Architecture.resolved`). For these, all members are targets, even members without a tensor.
    vLLM looks up all other fused modules by their name, so this name is also a target. If vLLM
    looks up a layer by another name than in the file, this name is also a target.

    The target of a quantized output head is a pattern, because vLLM's name of the head may be
    longer than the checkpoint's name (`language_model.lm_head`), and vLLM only renames targets with
    a dot. With `alone`, no other layers are quantized, and the class Linear is the target.
    """
    names = [name for layer in layers for name in _names(layer, architecture)]
    heads = [name for name in names if is_head(name)]
    patterns = [f"re:.*{name.rpartition('.')[2]}$" for name in heads]
    if alone:
        return ["Linear", *patterns]
    stored = (name for layer in others for name in (layer.name, *layer.members))
    different = all_names(stored, architecture)
    inner = [name for name in names if name not in heads]
    return [*_experts_together(inner, architecture, different), *patterns]


def _names(layer: FusedLayer, architecture: Architecture) -> Iterator[str]:
    """Yield the names by which vLLM looks up a fused layer."""
    names = [*lookup_names(layer, architecture)]
    is_fused = len(layer.members) > 1 and layer.experts is None
    if is_fused and layer.projection not in architecture.resolved:
        names.append(layer.name)
    yield from names
    yield from extra_lookup_entries(layer, names, architecture)


def _experts_together(
    names: Iterable[str], architecture: Architecture, others: Iterable[str]
) -> list[str]:
    """Replace the names of a layer's experts by patterns for each projection.

    In vLLM, all experts of a layer have the same scheme, so a pattern can match all of them. There
    are two patterns for a projection if vLLM's name of the layer differs from the name in the file
    (see `patterns_below`). Names of other layers are returned unchanged.
    """
    targets: dict[tuple[str, str], Sequence[str]] = {}
    for name in names:
        experts, last_part = moe_layer(name), name.rpartition(".")[2]
        key = (experts or "", last_part if experts else name)
        if key not in targets:
            # If experts have no gate, vLLM also looks up the missing projection.
            expert_names = architecture.experts
            without_gate = (
                expert_names is not None
                and expert_names.up is None
                and expert_names.gate == last_part
            )
            looked_up = re.escape(last_part)
            if without_gate:
                looked_up = f"(?:{looked_up}|{ABSENT_UP})"
            ending = rf"\.\d+\.{looked_up}$"
            targets[key] = (
                [*patterns_below(experts, ending, architecture, others)] if experts else [name]
            )
    return list(dict.fromkeys(entry for entries in targets.values() for entry in entries))


def _arguments(group: FusionGroup) -> SchemeArgs:
    args = group.scheme.args
    inputs = args.input_activations
    if inputs is not None and group.input_observer is not None:
        inputs = replace(
            inputs, observer=group.input_observer, observer_kwargs=group.input_observer_kwargs
        )
    weights = replace(args.weights, observer=group.observer, observer_kwargs=group.observer_kwargs)
    return SchemeArgs(weights=weights, input_activations=inputs)


def _json(args: QuantArgs | None) -> Json:
    dumped: Json = None if args is None else arguments_adapter().dump_python(args, mode="json")
    return dumped


def kv_layout(layer: AttentionLayer) -> tuple[TensorSpec, ...]:
    """Return the layout of the scales of keys, values and queries: (1,), or (heads, 1, 1)."""
    shape = (1,) if layer.heads is None else (layer.heads, 1, 1)
    module = f"{layer.name}.{INNER}" if layer.name.rpartition(".")[2] == INNER else layer.name
    names = (K_SCALE, V_SCALE, Q_SCALE) if layer.has_query_scale else (K_SCALE, V_SCALE)
    return tuple(TensorSpec(name=f"{module}.{name}", dtype="F32", shape=shape) for name in names)


def kv_scales(layer: AttentionLayer, ranges: Mapping[str, KeyValueRanges]) -> "tuple[Array, ...]":
    """Return the scales of keys, values and queries, as float32 in the order of `kv_layout`.

    A scale is the largest magnitude in calibration divided by 448. Raises InputError if calibration
    did not record the layer's keys and values, or recorded another number of heads.
    """
    layer_ranges = ranges.get(layer.name)
    heads = 0 if layer_ranges is None else len(layer_ranges.key.low)
    if layer_ranges is None or layer.heads not in (None, heads):
        all_heads = "all heads" if layer.heads is None else f"{layer.heads} heads"
        raise InputError.of(KV_HEADS, layer.name, heads=heads, needed=all_heads)
    query = layer_ranges.query if layer.has_query_scale else None
    observed = (layer_ranges.key, layer_ranges.value, query)
    return tuple(_scales(states, layer) for states in observed if states is not None)


def _scales(heads: HeadRanges, layer: AttentionLayer) -> "Array":
    from vexport.numerics.arithmetic import fp8_scale_of

    largest = [np.float32(max(-low, high)) for low, high in zip(heads.low, heads.high, strict=True)]
    if layer.heads is None:
        return fp8_scale_of(max(largest))
    return np.stack([fp8_scale_of(each) for each in largest]).reshape(-1, 1, 1)
