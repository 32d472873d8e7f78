"""The fp8 KV cache: a scale for keys and one for values, of each attention layer or of each of its KV heads.

Source: CompressedTensorsKVCacheMethod in vLLM's compressed_tensors.py. Per head needs an attention backend
that takes such scales (FlashAttention 3).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from vexport.errors import InputError
from vexport.formats.arguments import QuantArgs
from vexport.records import AttentionLayer, HeadRanges, KeyValueRanges, KvCache, TensorSpec

if TYPE_CHECKING:
    from vexport.formats.packing.base import Array

KEY, VALUE = "k_scale", "v_scale"
# vLLM puts its own attention into this attribute of a model's attention module, and finds the scales of
# `self_attn.k_scale` there by itself (get_cache_scale_mapper, quantization/base_config.py).
INNER = "attn"
KV_CACHES: Mapping[KvCache, QuantArgs] = {
    "fp8": QuantArgs(num_bits=8, type="float", strategy="tensor", observer="static_minmax"),
    "fp8_per_head": QuantArgs(num_bits=8, type="float", strategy="attn_head", observer="static_minmax"),
}


def kv_layout(layer: AttentionLayer) -> tuple[TensorSpec, TensorSpec]:
    """The scales of keys and values: (1,), or (heads, 1, 1) as compressed-tensors stores them by head."""
    shape = (1,) if layer.heads is None else (layer.heads, 1, 1)
    module = f"{layer.name}.{INNER}" if layer.name.rpartition(".")[2] == INNER else layer.name
    key, value = (TensorSpec(name=f"{module}.{name}", dtype="F32", shape=shape) for name in (KEY, VALUE))
    return key, value


def kv_scales(layer: AttentionLayer, ranges: Mapping[str, KeyValueRanges]) -> "tuple[Array, Array]":
    """Largest magnitude / 448 of keys and of values in calibration, in the shapes of `kv_layout`, float32.

    Raises InputError where calibration did not see the layer's keys and values, or other heads.
    """
    layer_ranges = ranges.get(layer.name)
    heads = 0 if layer_ranges is None else len(layer_ranges.key.low)
    if layer_ranges is None or layer.heads not in (None, heads):
        raise InputError(
            layer.name,
            got=f"keys and values of {heads} heads in calibration",
            need="those of all" if layer.heads is None else str(layer.heads),
            fix="leave the KV cache in the model's dtype, or use fp8 for all heads",
        )
    return _scales(layer_ranges.key, layer), _scales(layer_ranges.value, layer)


def _scales(heads: HeadRanges, layer: AttentionLayer) -> "Array":
    from vexport.numerics.arithmetic import fp8_scale_of

    largest = [np.float32(max(-low, high)) for low, high in zip(heads.low, heads.high, strict=True)]
    if layer.heads is None:
        return fp8_scale_of(max(largest))
    return np.stack([fp8_scale_of(each) for each in largest]).reshape(-1, 1, 1)
