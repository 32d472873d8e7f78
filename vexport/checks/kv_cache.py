"""Check that vLLM accepts the FP8 KV cache, and that every attention layer has its scales."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from vexport.architectures import NUMBERED_LAYER
from vexport.architectures.linears import key_projections
from vexport.checks.numbers import PLACEHOLDER, is_zero, largest_output
from vexport.checks.vllm.view import CheckpointView
from vexport.checks.vllm.zeros import is_empty
from vexport.formats.base import FLOAT_SCALES
from vexport.numerics import E4M3_MAX
from vexport.records import Finding, Json, TensorInfo
from vexport.rules import kv_cache as rules

DESCRIPTION = (
    "vLLM supports the KV cache scheme, and every attention layer has usable key and value scales"
)
SCALES = ("k_scale", "v_scale")
# Scale of the queries, which vLLM quantizes for attention in FP8. It is optional.
QUERY_SCALE = "q_scale"
STRATEGIES = ("tensor", "attn_head")
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
    accepted = isinstance(scheme, dict) and all(
        scheme.get(key) in values for key, values in ACCEPTED.items()
    )
    if scheme is not None and not accepted:
        where = f"{view.quantization.place}.kv_cache_scheme"
        yield Finding.at(rules.SCHEME, where, value=scheme, strategies=STRATEGIES)
        return
    scales = [*_read_scales(view)]
    stored = [(module, name, tensor) for module, name, tensor in scales if tensor is not None]
    if scheme is not None and scales and not stored:
        # The scales may be missing on purpose.
        yield Finding.at(rules.NO_SCALES, f"{view.quantization.place}: FP8 KV cache")
    if stored:
        yield from _missing_scales(view, scales)
    queries = dict(_query_scales(view)) if scales else {}
    yield from _missing_query_scales(queries)
    yield from _unread_query_scales(view, queries)
    stored += [(module, QUERY_SCALE, tensor) for module, tensor in queries.items() if tensor]
    for module, parameter, tensor in stored:
        per_head = isinstance(scheme, dict) and scheme["strategy"] == "attn_head"
        yield from _number_of_scales(view, parameter, tensor, per_head=per_head)
        yield from _values(view, module, parameter, tensor)


def _query_scales(view: CheckpointView) -> Iterator[tuple[str, TensorInfo | None]]:
    for projection in key_projections(view.model.fused_layers, view.model.names):
        module = projection.rpartition(".")[0]
        yield module, _stored_scale(view, module, QUERY_SCALE)


def _unread_query_scales(
    view: CheckpointView, queries: Mapping[str, TensorInfo | None]
) -> Iterator[Finding]:
    """Report scales of queries under names that vLLM does not map to an attention layer."""
    read = {tensor.name for tensor in queries.values() if tensor is not None}
    for name in view.index.tensors:
        is_scale = name.endswith(f".{QUERY_SCALE}") and view.model.names.in_decoder(name)
        if queries and is_scale and name not in read:
            yield Finding.at(rules.UNREAD_QUERY_SCALE, name)


def _missing_query_scales(queries: Mapping[str, TensorInfo | None]) -> Iterator[Finding]:
    """Report attention layers without a scale of queries, if other layers have one."""
    if any(queries.values()):
        for module in (module for module, tensor in queries.items() if tensor is None):
            yield Finding.at(rules.MISSING_QUERY_SCALE, f"{module}.{QUERY_SCALE}")


def _read_scales(view: CheckpointView) -> Iterator[tuple[str, str, TensorInfo | None]]:
    """Yield the tuples of `cache_scales` if vLLM has a class that reads the scales.

    vLLM reads stored scales of some methods although their configs do not enable an FP8 cache. It
    uses them with `--kv-cache-dtype fp8`.
    """
    method = view.quantization.method
    if method is None or method.kv_cache or method.pairs_cache_scales:
        yield from _all_cache_scales(view)


def _missing_scales(
    view: CheckpointView, scales: Iterable[tuple[str, str, TensorInfo | None]]
) -> Iterator[Finding]:
    missing: dict[str, list[str]] = {}
    for module, parameter, tensor in scales:
        if tensor is None:
            missing.setdefault(module, []).append(parameter)
    for module, parameters in missing.items():
        if len(parameters) == 1:
            yield _half_pair(view, module, *parameters)
        elif _reads_other_cache(view, module):
            yield Finding.at(rules.SHARED_CACHE, module)
        else:
            yield Finding.at(rules.MISSING_SCALES, module)


def _half_pair(view: CheckpointView, module: str, missing: str) -> Finding:
    """Return the finding on a layer that has only one of both scales.

    Sources: process_weights_after_loading of BaseKVCacheMethod (quantization/kv_cache.py) and
    create_weights of CompressedTensorsKVCacheMethod.
    """
    method = view.quantization.method
    if method is None or not method.pairs_cache_scales:
        rule = rules.MISSING_SCALE
    elif missing == "v_scale":
        rule = rules.KEY_SCALE_FOR_VALUES
    elif method.needs_cache_request:
        rule = rules.ONLY_VALUE_SCALE_ON_REQUEST
    else:
        rule = rules.ONLY_VALUE_SCALE
    return Finding.at(rule, f"{module}.{missing}")


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
        yield Finding.at(rules.UNDECLARED, f"{view.quantization.place}.kv_cache_scheme")


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
    for projection in key_projections(view.model.fused_layers, view.model.names):
        module = projection.rpartition(".")[0]
        for parameter in SCALES:
            yield module, parameter, _stored_scale(view, module, parameter)


def _stored_scale(view: CheckpointView, module: str, parameter: str) -> TensorInfo | None:
    """Return the scale under any name that vLLM accepts.

    Source: get_cache_scale_mapper in quantization/base_config.py.
    """
    tensors = view.index.tensors
    method = view.quantization.method
    own = method.cache_scales if method else {}
    endings = [own.get(parameter, parameter), parameter, f"attn.{parameter}"]
    if parameter in SCALES:
        endings += [f"{parameter[0]}_proj.{parameter}", f"qkv_proj.{parameter}"]
    # vLLM loads `kv_scale` as k_scale. Only BaseKVCacheMethod uses it for values, too.
    if parameter == "k_scale" or method is not None:
        endings.append("kv_scale")
    return next(
        (tensors[name] for ending in endings if (name := f"{module}.{ending}") in tensors), None
    )


def _number_of_scales(
    view: CheckpointView, parameter: str, tensor: TensorInfo, *, per_head: bool
) -> Iterator[Finding]:
    """Report scales of another number than all heads or the query or KV heads.

    vLLM reduces the scales of query heads to the largest of each KV head (_tp_aware_loader).
    """
    key = "num_attention_heads" if parameter == QUERY_SCALE else "num_key_value_heads"
    heads = view.model.text.get(key) if per_head else None
    count = tensor.num_elements
    if not per_head and count != 1:
        yield Finding.at(rules.SCALE_COUNT, tensor.name, count=count)
    if isinstance(heads, int) and heads > 0 and count % heads:
        yield Finding.at(rules.SCALES_PER_HEAD, tensor.name, count=count, heads=heads)


def _values(
    view: CheckpointView, module: str, parameter: str, tensor: TensorInfo
) -> Iterator[Finding]:
    values = view.reader.floats(tensor)
    is_good = np.isfinite(values) & (values > 0)
    # A negative scale of queries, as llm-compressor writes, cancels out. Kernels that subtract the
    # maximum before they scale could still overflow.
    is_usable = np.isfinite(values) & (values != 0) if parameter == QUERY_SCALE else is_good
    bad = int(np.count_nonzero(~is_good))
    invalid = rules.INVALID_SCALE.as_warning if is_usable.all() else rules.INVALID_SCALE
    name, dtypes = tensor.name, sorted(FLOAT_SCALES)
    if tensor.dtype not in FLOAT_SCALES:
        yield Finding.at(rules.SCALE_DTYPE, name, dtype=tensor.dtype, dtypes=dtypes)
    if bad:
        yield Finding.at(invalid, name, invalid=bad, count=values.size)
    projection = f"{module}.{parameter[0]}_proj"
    if bad or not values.size or _outputs_only_zeros(view, projection):
        return
    bound = largest_output(view, projection)
    most = MAX_SCALE if bound is None else min(MAX_SCALE, bound / E4M3_MAX)
    largest = float(values.max())
    if (values == PLACEHOLDER).all():
        yield Finding.at(rules.UNCALIBRATED, name)
    elif largest > most:
        yield Finding.at(rules.LARGE_SCALE, name, value=largest, most=most)
    elif largest < MIN_SCALE:
        yield Finding.at(rules.SMALL_SCALE, name, value=largest, least=MIN_SCALE)


def _outputs_only_zeros(view: CheckpointView, module: str) -> bool:
    """Return True if all outputs of a layer are zero, so that any scale fits its keys or values."""
    layer = view.layers.by_name.get(module)
    if layer is None or layer.filled("bias") is not None:
        return False
    if layer.group is not None:
        return is_empty(view, layer)
    return layer.weight is not None and is_zero(view, layer.weight)
