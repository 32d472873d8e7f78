"""Check that vLLM accepts the FP8 KV cache, and that every attention layer has its scales."""

import json
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from vexport.architectures import NUMBERED_LAYER
from vexport.architectures.linears import is_attention, is_key_projection
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
    if scheme is None and view.quantization.method is None:
        yield from _undeclared_scheme(view)
        return
    if scheme is not None and not _is_accepted(scheme):
        where = f"{view.quantization.place}.kv_cache_scheme"
        expected = f"float, 8 bits, symmetric, strategy {' or '.join(STRATEGIES)}"
        fix = "quantize the KV cache again, or remove the key"
        yield error(
            NAME, where, claim="refused", expected=expected, got=json.dumps(scheme), fix=fix
        )
        return
    scales = [*_read_scales(view)]
    stored = [(module, name, tensor) for module, name, tensor in scales if tensor is not None]
    if scheme is not None and scales and not stored:
        yield _no_scales(view)
    if stored:
        yield from _missing_scales(view, scales)
    for module, parameter, tensor in stored:
        per_head = isinstance(scheme, dict) and scheme["strategy"] == "attn_head"
        yield from _number_of_scales(view, tensor, per_head=per_head)
        yield from _values(view, module, parameter, tensor)


def _is_accepted(scheme: Json) -> bool:
    return isinstance(scheme, dict) and all(
        scheme.get(key) in accepted for key, accepted in ACCEPTED.items()
    )


def _read_scales(view: CheckpointView) -> Iterator[tuple[str, str, TensorInfo | None]]:
    """Yield the tuples of `cache_scales` if vLLM has a class that reads the scales.

    vLLM reads stored scales of some methods although their configs do not enable an FP8 cache. It
    uses them with `--kv-cache-dtype fp8`.
    """
    method = view.quantization.method
    if method is None or method.kv_cache or method.pairs_cache_scales:
        yield from _all_cache_scales(view)


def _no_scales(view: CheckpointView) -> Finding:
    """Return a warning that no layer has a scale, which may be on purpose."""
    where = f"{view.quantization.place}: FP8 KV cache"
    expected = "calibrated scales of keys and values"
    got = "no scale in any layer: vLLM would use 1.0"
    return warning(NAME, where, claim="values", expected=expected, got=got, fix=FIX)


def _missing_scales(
    view: CheckpointView, scales: Iterable[tuple[str, str, TensorInfo | None]]
) -> Iterator[Finding]:
    """Report layers without a scale of keys or values, although a layer has such a scale."""
    missing: dict[str, list[str]] = {}
    for module, parameter, tensor in scales:
        if tensor is None:
            missing.setdefault(module, []).append(parameter)
    for module, parameters in missing.items():
        if len(parameters) == 1:
            yield _half_pair(view, module, *parameters)
        elif _reads_other_cache(view, module):
            expected = "the scales of the layer that fills this cache"
            got = "no scales: vLLM would read the shared KV cache with 1.0"
            yield warning(NAME, module, claim="values", expected=expected, got=got, fix=FIX)
        else:
            expected = "scales of the FP8 KV cache, as in other layers"
            got = "no k_scale and no v_scale: vLLM would use 1.0"
            yield error(NAME, module, claim="values", expected=expected, got=got, fix=FIX)


def _half_pair(view: CheckpointView, module: str, missing: str) -> Finding:
    """Return the finding on a layer that has only one of both scales.

    Sources: process_weights_after_loading of BaseKVCacheMethod (quantization/kv_cache.py) and
    create_weights of CompressedTensorsKVCacheMethod.
    """
    where, expected = f"{module}.{missing}", "a scale of the FP8 KV cache"
    method = view.quantization.method
    if method is None or not method.pairs_cache_scales:
        got = "no such tensor: vLLM would use 1.0"
        return error(NAME, where, claim="values", expected=expected, got=got, fix=FIX)
    if missing == "v_scale":
        got = "no such tensor: vLLM uses k_scale for keys and values"
        return warning(NAME, where, claim="values", expected=expected, got=got, fix=FIX)
    when = " with --kv-cache-dtype fp8" if method.needs_cache_request else ""
    got = f"no such tensor: vLLM asserts k_scale > 0{when}, because v_scale is stored"
    # Not a claim of refusal: the assertion follows the load, so that a dry load cannot decide it.
    return error(NAME, where, claim="values", expected=expected, got=got, fix=FIX)


def _reads_other_cache(view: CheckpointView, module: str) -> bool:
    """Return True if the last layers of the model share the KV cache of earlier layers.

    Source: Gemma3nAttention in vllm/model_executor/models/gemma3n.py.
    """
    text, number = view.model.text, NUMBERED_LAYER.search(f"{module}.")
    layers, shared = text.get("num_hidden_layers"), text.get("num_kv_shared_layers")
    if number is None or not isinstance(layers, int) or not isinstance(shared, int):
        return False
    return int(number[1]) >= layers - shared


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
    names, architecture = view.model.names, view.model.architecture
    attention = [
        member.rpartition(".")[0]
        for fused in view.model.fused_layers
        for member in fused.members
        if is_key_projection(member, names) and is_attention(fused, architecture)
    ]
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
    endings = [
        own.get(parameter, parameter),
        parameter,
        f"attn.{parameter}",
        f"{parameter[0]}_proj.{parameter}",
        f"qkv_proj.{parameter}",
    ]
    # vLLM loads `kv_scale` as k_scale. Only BaseKVCacheMethod uses it for values, too.
    if parameter == "k_scale" or method is not None:
        endings.append("kv_scale")
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
