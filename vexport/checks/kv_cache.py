"""Check that vLLM accepts the FP8 KV cache, and that every attention layer has its scales."""

import json
from collections.abc import Iterator, Mapping

import numpy as np

from vexport.architectures.linears import is_key_projection
from vexport.checks.numbers import PLACEHOLDER, is_zero, largest_output
from vexport.checks.vllm.findings import error, warning
from vexport.checks.vllm.view import CheckpointView
from vexport.checks.vllm.zeros import is_empty
from vexport.errors import alternatives
from vexport.formats.base import FLOAT_SCALES
from vexport.numerics import E4M3_MAX
from vexport.records import Finding, Json, TensorInfo
from vexport.records.values import plural

NAME = "kv_cache"
DESCRIPTION = (
    "vLLM supports the KV cache scheme, and every attention layer has usable key and value scales"
)
SCALES = ("k_scale", "v_scale")
STRATEGIES = ("tensor", "attn_head")
FIX = "quantize the KV cache again with calibration"
# Largest plausible scale, for keys and values up to 4096. The keys and values of trained models
# reach several hundred.
MAX_SCALE = 4096 / E4M3_MAX
# Smallest plausible scale, for keys and values up to 1e-3.
MIN_SCALE = 1e-3 / E4M3_MAX
# Keys of the scheme that vLLM reads, each with the accepted values (validate_kv_cache_scheme of
# CompressedTensorsKVCacheMethod).
ACCEPTED: Mapping[str, tuple[Json, ...]] = {
    "type": ("float",),
    "num_bits": (8,),
    "symmetric": (True,),
    "strategy": STRATEGIES,
}
# The only KV cache scheme of methods other than compressed-tensors. Their configs enable it with a
# separate key.
DECLARED_SCHEME: Mapping[str, Json] = {
    "type": "float",
    "num_bits": 8,
    "symmetric": True,
    "strategy": "tensor",
}


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on kv_cache_scheme and its scales."""
    scheme = cache_scheme(view)
    if scheme is None:
        yield from _undeclared_scheme(view) if view.quantization.method is None else ()
        return
    if not isinstance(scheme, dict) or any(
        scheme.get(key) not in right for key, right in ACCEPTED.items()
    ):
        where = f"{view.quantization.place}.kv_cache_scheme"
        expected = f"float, 8 bits, symmetric, strategy {' or '.join(STRATEGIES)}"
        fix = "quantize the KV cache again, or remove the key"
        yield error(
            NAME, where, claim="refused", expected=expected, got=json.dumps(scheme), fix=fix
        )
        return
    for module, parameter, tensor in cache_scales(view):
        if tensor is None:
            where, expected = f"{module}.{parameter}", "a scale of the FP8 KV cache"
            got = "no such tensor: vLLM would use 1.0"
            fix = "quantize the KV cache again, or remove kv_cache_scheme"
            # Producers that use other methods may rely on vLLM's default scale on purpose.
            finding = error if view.quantization.method is None else warning
            yield finding(NAME, where, claim="values", expected=expected, got=got, fix=fix)
        else:
            yield from _number_of_scales(view, tensor, per_head=scheme["strategy"] == "attn_head")
            yield from _values(view, module, parameter, tensor)


def _undeclared_scheme(view: CheckpointView) -> Iterator[Finding]:
    """Report a config without a KV cache scheme if all attention layers have calibrated scales.

    Without the scheme, vLLM keeps the KV cache in 16 bits.
    """
    if view.quantization.values is None:
        return
    stored = [tensor for _, _, tensor in _all_cache_scales(view)]
    if stored and all(stored):
        where = f"{view.quantization.place}.kv_cache_scheme"
        expected = "a scheme, because all attention layers have scales of the FP8 KV cache"
        got = "no such key: vLLM would not quantize the KV cache"
        yield error(
            NAME,
            where,
            claim="precision",
            expected=expected,
            got=got,
            fix="set kv_cache_scheme, or remove the scales",
        )


def cache_scales(view: CheckpointView) -> Iterator[tuple[str, str, TensorInfo | None]]:
    """Yield (attention module, `k_scale` or `v_scale`, tensor) for each scale of the KV cache.

    The tensor is None if the scale is missing. Yields nothing if the config declares no KV cache
    scheme.
    """
    if cache_scheme(view) is not None:
        yield from _all_cache_scales(view)


def cache_scheme(view: CheckpointView) -> Json:
    """Return the KV cache scheme that the config declares, or None.

    For methods other than compressed-tensors, the scheme is DECLARED_SCHEME or None.
    """
    if view.quantization.method is None:
        return (view.quantization.values or {}).get("kv_cache_scheme")
    return {**DECLARED_SCHEME} if view.quantization.method.kv_cache else None


def _all_cache_scales(view: CheckpointView) -> Iterator[tuple[str, str, TensorInfo | None]]:
    """Yield the tuples of `cache_scales` whether or not the config declares a KV cache scheme."""
    names = view.model.names
    attention = (
        module.rpartition(".")[0]
        for module in view.layers.by_name
        if is_key_projection(module, names)
    )
    for module in attention:
        yield from (
            (module, parameter, _stored_scale(view, module, parameter)) for parameter in SCALES
        )


def _stored_scale(view: CheckpointView, module: str, parameter: str) -> TensorInfo | None:
    """Return the scale under any name that vLLM accepts.

    Source: get_cache_scale_mapper in quantization/base_config.py.
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


def _number_of_scales(
    view: CheckpointView, tensor: TensorInfo, *, per_head: bool
) -> Iterator[Finding]:
    """Report a wrong number of scales.

    Strategy tensor needs a single scale. Strategy attn_head needs a multiple of the KV heads.
    """
    heads = view.model.text.get("num_key_value_heads") if per_head else None
    if not per_head and tensor.num_elements != 1:
        yield _scale_finding(
            tensor,
            "one scale for all heads (strategy tensor)",
            plural(tensor.num_elements, "value"),
        )
    if isinstance(heads, int) and heads > 0 and tensor.num_elements % heads:
        expected = f"a scale for each of {heads} KV heads (strategy attn_head)"
        yield _scale_finding(tensor, expected, plural(tensor.num_elements, "value"))


def _values(
    view: CheckpointView, module: str, parameter: str, tensor: TensorInfo
) -> Iterator[Finding]:
    """Yield findings on scales with a wrong dtype, or with invalid or implausible values."""
    values = view.reader.floats(tensor)
    bad = int(np.count_nonzero(~(np.isfinite(values) & (values > 0))))
    if tensor.dtype not in FLOAT_SCALES:
        yield _scale_finding(tensor, f"dtype {alternatives(sorted(FLOAT_SCALES))}", tensor.dtype)
    if bad:
        got = f"{plural(bad, 'NaN, infinite, zero or negative value')} of {values.size:,}"
        yield _scale_finding(tensor, "finite scales above zero", got)
    projection = f"{module}.{parameter[0]}_proj"
    if bad or not values.size or _outputs_only_zeros(view, projection):
        return
    bound = largest_output(view, projection)
    most = MAX_SCALE if bound is None else min(MAX_SCALE, bound / E4M3_MAX)
    if (values == PLACEHOLDER).all():
        got = "1, which is vLLM's default without a scale"
        yield warning(
            NAME, tensor.name, claim="values", expected="a calibrated scale", got=got, fix=FIX
        )
    elif values.max() > most:
        got = f"{values.max():g}, which looks like a reciprocal"
        yield _scale_finding(tensor, f"scales of at most {most:.3g}", got)
    elif values.max() < MIN_SCALE:
        got = f"{values.max():g}, which is too small for keys and values"
        yield _scale_finding(tensor, f"scales of at least {MIN_SCALE:g}", got)


def _outputs_only_zeros(view: CheckpointView, module: str) -> bool:
    """Return True if all outputs of a layer are zero, so that any scale fits its keys or values."""
    layer = view.layers.by_name.get(module)
    if layer is None or layer.filled("bias") is not None:
        return False
    if layer.group is not None:
        return is_empty(view, layer)
    return layer.weight is not None and is_zero(view, layer.weight)


def _scale_finding(tensor: TensorInfo, expected: str, got: str) -> Finding:
    return error(NAME, tensor.name, claim="values", expected=expected, got=got, fix=FIX)
