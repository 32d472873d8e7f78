"""The fp8 KV cache: a scale for keys and one for values, of each attention layer or of each of its KV heads.

Source: CompressedTensorsKVCacheMethod in vLLM's compressed_tensors.py. Per head needs an attention backend
that takes such scales (FlashAttention 3).
"""

from collections.abc import Mapping

from vexport.schemes.base import QuantArgs
from vexport.types import AttentionLayer, KvCache, TensorSpec

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
    key, value = (TensorSpec(name=f"{module}.{leaf}", dtype="F32", shape=shape) for leaf in (KEY, VALUE))
    return key, value
