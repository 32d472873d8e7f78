"""Rules of the FP8 KV cache and its scales."""

from vexport.rules.book import Rule

_CALIBRATE = "quantize the KV cache again with calibration"

SCHEME = Rule(
    "kv_cache/scheme",
    claim="refused",
    got="{value!j}",
    need="float, 8 bits, symmetric, strategy {strategies:or}",
    do="quantize the KV cache again, or remove the key",
)
UNDECLARED = Rule(
    "kv_cache/undeclared",
    claim="precision",
    got="no such key, although all attention layers have scales of the FP8 KV cache: vLLM would "
    "not quantize it",
    do="set kv_cache_scheme, or remove the scales",
)
NO_SCALES = Rule(
    "kv_cache/no-scales",
    "warning",
    "values",
    got="no scale in any layer: vLLM would use 1.0 for all keys and values",
    do=_CALIBRATE,
)
MISSING_SCALES = Rule(
    "kv_cache/missing-scales",
    claim="values",
    got="no k_scale and no v_scale, unlike other layers: vLLM would use 1.0",
    do=_CALIBRATE,
)
SHARED_CACHE = Rule(
    "kv_cache/shared-cache",
    "warning",
    "values",
    got="no scales: vLLM would read the KV cache, which an earlier layer fills, with 1.0",
    do=_CALIBRATE,
)
MISSING_SCALE = Rule(
    "kv_cache/missing-scale",
    claim="values",
    got="no such tensor: vLLM would use 1.0",
    do=_CALIBRATE,
)
KEY_SCALE_FOR_VALUES = Rule(
    "kv_cache/key-scale-for-values",
    "warning",
    "values",
    got="no such tensor: vLLM uses k_scale for keys and values",
    do=_CALIBRATE,
)
# Not a claim of refusal: the assertion follows the load, so that a dry load cannot decide it.
ONLY_VALUE_SCALE = Rule(
    "kv_cache/only-value-scale",
    claim="values",
    got="no such tensor: vLLM asserts k_scale > 0, because v_scale is stored",
    do=_CALIBRATE,
)
ONLY_VALUE_SCALE_ON_REQUEST = Rule(
    "kv_cache/only-value-scale-on-request",
    claim="values",
    got="no such tensor: vLLM asserts k_scale > 0 with --kv-cache-dtype fp8, because v_scale is "
    "stored",
    do=_CALIBRATE,
)
MISSING_QUERY_SCALE = Rule(
    "kv_cache/missing-query-scale",
    "warning",
    claim="values",
    got="no such tensor, unlike other layers: vLLM would quantize queries with 1.0 or with k_scale",
    do=_CALIBRATE,
)
UNREAD_QUERY_SCALE = Rule(
    "kv_cache/unread-query-scale",
    claim="values",
    got="a scale of queries under a name that vLLM does not map to an attention layer",
    need="the name q_scale in the attention layer, beside k_scale",
    do="rename the tensor",
)
SCALE_COUNT = Rule(
    "kv_cache/scale-count",
    claim="values",
    got="{count:# value}",
    need="one scale for all heads (strategy tensor)",
    do=_CALIBRATE,
)
SCALES_PER_HEAD = Rule(
    "kv_cache/scales-per-head",
    claim="values",
    got="{count:# value}",
    need="a scale for each of {heads} heads (strategy attn_head)",
    do=_CALIBRATE,
)
SCALE_DTYPE = Rule(
    "kv_cache/scale-dtype",
    claim="values",
    got="{dtype}",
    need="dtype {dtypes:or}",
    do=_CALIBRATE,
)
INVALID_SCALE = Rule(
    "kv_cache/invalid-scale",
    claim="values",
    got="{invalid:# NaN, infinite, zero or negative value} of {count:,}",
    need="finite scales above zero",
    do=_CALIBRATE,
)
UNCALIBRATED = Rule(
    "kv_cache/uncalibrated",
    "warning",
    "values",
    got="1, which is vLLM's default without a scale",
    need="a calibrated scale",
    do=_CALIBRATE,
)
LARGE_SCALE = Rule(
    "kv_cache/large-scale",
    claim="values",
    got="{value:g}, which looks like a reciprocal",
    need="scales of at most {most:.3g}",
    do=_CALIBRATE,
)
SMALL_SCALE = Rule(
    "kv_cache/small-scale",
    claim="values",
    got="{value:g}, which is too small for keys and values",
    need="scales of at least {least:g}",
    do=_CALIBRATE,
)
