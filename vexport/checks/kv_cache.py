"""Is the fp8 KV cache one that vLLM accepts, and does every attention layer have its scales?"""

import json
from collections.abc import Iterator, Mapping

import numpy as np

from vexport.architectures.linears import makes_keys
from vexport.checks.numbers import PLACEHOLDER, is_zero, largest_output
from vexport.checks.vllm.findings import error, warning
from vexport.checks.vllm.view import CheckpointView
from vexport.checks.vllm.zeros import is_empty
from vexport.formats.base import FLOAT_SCALES
from vexport.numerics import E4M3_MAX
from vexport.records import Finding, Json, TensorInfo

NAME = "kv_cache"
DESCRIPTION = (
    "the KV cache is stored as vLLM can, with a usable scale for the keys and values of every layer"
)
SCALES = ("k_scale", "v_scale")
STRATEGIES = ("tensor", "attn_head")
FIX = "quantize the KV cache again with calibration"
# For keys and values up to 4096; the largest known are some hundreds.
MOST_SCALE = 4096 / E4M3_MAX
# For keys and values of at most a thousandth.
LEAST_SCALE = 1e-3 / E4M3_MAX
# All that vLLM reads of the scheme (validate_kv_cache_scheme of CompressedTensorsKVCacheMethod).
ACCEPTED: Mapping[str, tuple[Json, ...]] = {
    "type": ("float",),
    "num_bits": (8,),
    "symmetric": (True,),
    "strategy": STRATEGIES,
}
# KV cache dtypes that other methods can declare.
ANNOUNCED: Mapping[str, Json] = {
    "type": "float",
    "num_bits": 8,
    "symmetric": True,
    "strategy": "tensor",
}


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on kv_cache_scheme and its scales."""
    scheme = cache_scheme(view)
    if scheme is None:
        yield from _unannounced(view) if view.quantization.method is None else ()
        return
    if not isinstance(scheme, dict) or any(
        scheme.get(key) not in right for key, right in ACCEPTED.items()
    ):
        where = f"{view.quantization.place}.kv_cache_scheme"
        expected = f"float, 8 bits, symmetric, strategy {' or '.join(STRATEGIES)}"
        fix = "quantize the KV cache again, or remove the key"
        yield error(NAME, where, expected=expected, got=json.dumps(scheme), fix=fix)
        return
    for module, parameter, tensor in cache_scales(view):
        if tensor is None:
            where, expected = f"{module}.{parameter}", "the scale of the fp8 KV cache"
            got = "no scale: vLLM would use 1.0"
            fix = "quantize the KV cache again, or remove kv_cache_scheme"
            finding = error if view.quantization.method is None else warning
            yield finding(NAME, where, expected=expected, got=got, fix=fix)
        else:
            yield from _count(view, tensor, per_head=scheme["strategy"] == "attn_head")
            yield from _values(view, module, parameter, tensor)


def _unannounced(view: CheckpointView) -> Iterator[Finding]:
    """Scales of all attention layers, calibrated for a cache that vLLM would keep in 16 bits."""
    if view.quantization.values is None:
        return
    stored = [tensor for _, _, tensor in _places(view)]
    if stored and all(stored):
        where = f"{view.quantization.place}.kv_cache_scheme"
        expected = "the scheme of the fp8 KV cache, of which all attention layers have the scales"
        got = "no scheme: vLLM would not quantize the cache"
        yield error(
            NAME, where, expected=expected, got=got, fix="set kv_cache_scheme, or remove the scales"
        )


def cache_scales(view: CheckpointView) -> Iterator[tuple[str, str, TensorInfo | None]]:
    """Every attention module with k_scale and v_scale, and the tensor that vLLM takes for it."""
    if cache_scheme(view) is not None:
        yield from _places(view)


def cache_scheme(view: CheckpointView) -> Json:
    """The scheme that the config announces; of other methods, for which vLLM's 1.0 may be meant,
    what is announced is always the same."""
    if view.quantization.method is None:
        return (view.quantization.values or {}).get("kv_cache_scheme")
    return {**ANNOUNCED} if view.quantization.method.kv_cache else None


def _places(view: CheckpointView) -> Iterator[tuple[str, str, TensorInfo | None]]:
    names = view.model.names
    attention = (
        module.rpartition(".")[0] for module in view.layers.by_name if makes_keys(module, names)
    )
    for module in attention:
        yield from ((module, parameter, _stored(view, module, parameter)) for parameter in SCALES)


def _stored(view: CheckpointView, module: str, parameter: str) -> TensorInfo | None:
    """The scale under any name that vLLM finds (get_cache_scale_mapper,
    quantization/base_config.py).
    """
    tensors = view.index.tensors
    method = view.quantization.method
    own = method.cache_scales if method else {}
    endings = (
        own.get(parameter, parameter),
        parameter,
        f"attn.{parameter}",
        f"{parameter[0]}_proj.{parameter}",
        f"qkv_proj.{parameter}",
        "kv_scale",
    )
    return next(
        (tensors[name] for ending in endings if (name := f"{module}.{ending}") in tensors), None
    )


def _count(view: CheckpointView, tensor: TensorInfo, *, per_head: bool) -> Iterator[Finding]:
    heads = view.model.text.get("num_key_value_heads") if per_head else None
    if not per_head and tensor.num_elements != 1:
        yield _wrong(
            tensor, "one scale for all heads (strategy tensor)", f"{tensor.num_elements} values"
        )
    if isinstance(heads, int) and heads > 0 and tensor.num_elements % heads:
        expected = f"a scale for each of {heads} KV heads (strategy attn_head)"
        yield _wrong(tensor, expected, str(tensor.num_elements))


def _values(
    view: CheckpointView, module: str, parameter: str, tensor: TensorInfo
) -> Iterator[Finding]:
    """Return whether scales are numbers, of a size that those of keys and values can have."""
    values = view.reader.floats(tensor)
    bad = int(np.count_nonzero(~(np.isfinite(values) & (values > 0))))
    if tensor.dtype not in FLOAT_SCALES:
        yield _wrong(tensor, f"dtype {' or '.join(sorted(FLOAT_SCALES))}", tensor.dtype)
    if bad:
        got = f"{bad} of {values.size} values NaN, infinite or <= 0"
        yield _wrong(tensor, "finite scales above zero", got)
    makes = f"{module}.{parameter[0]}_proj"
    if bad or not values.size or _makes_zeros(view, makes):
        return
    reach = largest_output(view, makes)
    most = MOST_SCALE if reach is None else min(MOST_SCALE, reach / E4M3_MAX)
    if (values == PLACEHOLDER).all():
        got = "1, which vLLM takes where there is none"
        yield warning(NAME, tensor.name, expected="a calibrated scale", got=got, fix=FIX)
    elif values.max() > most:
        got = f"{values.max():g}, which looks like a reciprocal"
        yield _wrong(tensor, f"scales of at most {most:.3g}", got)
    elif values.max() < LEAST_SCALE:
        yield _wrong(tensor, f"scales of at least {LEAST_SCALE:g}", f"{values.max():g}")


def _makes_zeros(view: CheckpointView, module: str) -> bool:
    """Return True if all outputs of a layer are zero: a scale of any size fits these keys or
    values.
    """
    layer = view.layers.by_name.get(module)
    if layer is None or layer.filled("bias") is not None:
        return False
    if layer.group is not None:
        return is_empty(view, layer)
    return layer.weight is not None and is_zero(view, layer.weight)


def _wrong(tensor: TensorInfo, expected: str, got: str) -> Finding:
    return error(NAME, tensor.name, expected=expected, got=got, fix=FIX)
