"""Scales of the KV cache that the config announces and the checkpoint does not have."""

from collections.abc import Mapping
from functools import partial

import torch

from vexport.architectures.text_config import text_config
from vexport.checks import kv_cache
from vexport.checks.vllm.layers import layers_of
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.source import Source
from vexport.formats.kv_cache import KEY, KV_CACHES, VALUE, kv_layout
from vexport.formats.parsing import parse_args
from vexport.plan.kv_cache import attention_layers
from vexport.plan.linears import names_of
from vexport.repair.changes import Changes, Edit, Repair
from vexport.types import AttentionLayer, KvCache, LinearPlan, TensorSpec

NAME = "KV cache"


def run(view: CheckpointView, source: Source | None) -> Changes:
    """Scales of 1.0 for all attention layers; nothing where some have scales: 1.0 would not go with them."""
    layers = _attention(view)
    specs = [(layer, spec) for layer in layers for spec in kv_layout(layer)]
    missing = {finding.where for finding in kv_cache.run(view)} - view.index.tensors.keys()
    if not all(f"{layer.name}.{parameter}" in missing for layer in layers for parameter in (KEY, VALUE)):
        return Changes()
    near = {layer.name: _neighbour(view, layer) for layer in layers}
    edits = [Edit(tensors=(spec,), near=near[layer.name], make=partial(_ones, spec)) for layer, spec in specs]
    repairs = [_repair(layer) for layer in layers]
    return Changes(edits=tuple(edits), repairs=tuple(repairs))


def _attention(view: CheckpointView) -> tuple[AttentionLayer, ...]:
    """The layers that get static scales by the config; none without a static kv_cache_scheme."""
    scheme = parse_args((view.quantization or {}).get("kv_cache_scheme"))
    if isinstance(scheme, str) or scheme.dynamic:
        return ()
    kind: KvCache = "fp8_per_head" if scheme.strategy == KV_CACHES["fp8_per_head"].strategy else "fp8"
    linears = [
        LinearPlan(name=name, weight=f"{name}.weight", out_features=0, in_features=0)
        for name in layers_of(view)
    ]
    names = names_of(view.index, view.architecture)
    return attention_layers(linears, names, text_config(view.index.config), kind)


def _neighbour(view: CheckpointView, layer: AttentionLayer) -> str:
    """The last tensor of the attention module."""
    return [name for name in view.index.tensors if name.startswith(f"{layer.name}.")][-1]


def _ones(spec: TensorSpec) -> Mapping[str, torch.Tensor]:
    return {spec.name: torch.ones(spec.shape, dtype=torch.float32)}


def _repair(layer: AttentionLayer) -> Repair:
    return Repair(
        family=NAME,
        where=layer.name,
        got="a static kv_cache_scheme and no k_scale or v_scale",
        now="1.0 for keys and values",
        cost="unknown without a calibration: keys and values beyond 448 saturate, small ones lose bits; "
        "it is what vLLM would take silently",
    )
