"""`quark`: FP8, INT8, INT4, MXFP4 and NVFP4 as stored by AMD Quark, also mixed by layer.

Source: vllm/model_executor/layers/quantization/quark/quark.py and schemes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatch

from vexport.checks.vllm.quant_methods.base import (
    CACHE_SCALES,
    MethodConfig,
    MethodFormat,
    MethodFp8,
    MethodGroup,
    MethodMxfp4,
    QuantMethod,
    linear_group,
    preset_group,
)
from vexport.checks.vllm.quant_methods.integers import AWQ_POSITIONS, CODES, Awq, integer_group
from vexport.checks.vllm.quant_methods.modelopt import ModelOptFp8, ModelOptNvfp4
from vexport.formats.arguments import Arguments
from vexport.formats.base import Parameter, exact
from vexport.formats.integer import Int8
from vexport.formats.schemes import get_scheme
from vexport.numerics import MX_GROUP, NVFP4_GROUP
from vexport.records import Json
from vexport.records.patterns import Patterns
from vexport.rules import config as rules

METHOD, SOURCE = "quark", "quark/quark.py"
PACK_METHODS = ("order", "reorder")
# Settings of weights or inputs. vexport adds two keys: SECOND is True if the scales are quantized
# too, with a second scale. EXPONENTS is True if the scales are exponents.
Settings = Mapping[str, Json]
SECOND, EXPONENTS = "second", "exponents"


def read(config: MethodConfig) -> QuantMethod:
    """Return the method as vLLM reads it.

    A layer uses the settings for its name, or the global settings. The output head is never
    quantized.
    """
    values = config.values
    export = values.get("export")
    if not isinstance(export, dict):
        config.add_problem(rules.REQUIRED_OBJECT, "export", value=export, source=SOURCE)
    exported: Mapping[str, Json] = export if isinstance(export, dict) else {}
    method = str(exported.get("pack_method"))
    kept = Patterns(config.names("exclude"))
    layers, base = values.get("layer_quant_config"), values.get("global_quant_config")
    cached = exported.get("kv_cache_group")
    _cache(config, cached, layers)
    by_layer = {
        name: _group(config, f"layer_quant_config.{name}", each, method)
        for name, each in _items(layers)
    }
    default_group = _group(config, "global_quant_config", base, method)

    def group_of(layer: str, name: str) -> MethodGroup | None:
        experts = layer.endswith(".experts")
        below = experts and any(entry.startswith(f"{layer}.") for entry in kept)
        if below or kept.match(layer) or kept.match(name):
            return None
        return next(
            (group for entry, group in by_layer.items() if _entry_matches(entry, name)),
            default_group,
        )

    return QuantMethod(
        name=METHOD,
        skip_key="exclude",
        groups=[group for group in (default_group, *by_layer.values()) if group is not None],
        group_of=group_of,
        kv_cache=bool(cached),
        cache_scales=CACHE_SCALES,
        pairs_cache_scales=True,
    )


def _cache(config: MethodConfig, cached: Json, layers: Json) -> None:
    """Add a problem if the layers of the KV cache have no FP8 output settings.

    vLLM uses these output settings for the KV cache (from_config, validate_kv_cache_config).
    """
    patterns = [str(each) for each in cached] if isinstance(cached, list) else []
    named = (
        each for name, each in _items(layers) if any(fnmatch(name, pattern) for pattern in patterns)
    )
    outputs = [each.get("output_tensors") for each in named if isinstance(each, dict)]
    settings = [each for each in outputs if isinstance(each, dict)]
    fp8: Settings = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
    if patterns and not (settings and all(_has(each, fp8) for each in settings)):
        config.add_problem(rules.QUARK_CACHE, "export.kv_cache_group", patterns=patterns)


def _items(value: Json) -> Iterator[tuple[str, Json]]:
    yield from value.items() if isinstance(value, dict) else ()


def _entry_matches(entry: str, name: str) -> bool:
    """Return True if an entry of layer_quant_config matches a layer.

    Source: get_layer_quant_config_from_name.
    """
    return fnmatch(name, entry) if "*" in entry else name in entry


def _side_settings(raw: Mapping[str, Json], key: str) -> Settings | None:
    """Return the settings of weights or inputs, or None if there are none.

    The value is an object or a list. In a list, the second object describes the scales.
    """
    value = raw.get(key)
    listed = [
        each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)
    ]
    if not listed:
        return None
    exponents = listed[0].get("scale_type") == "float8_e8m0fnu"
    return {**listed[0], SECOND: len(listed) > 1, EXPONENTS: exponents}


def _has(settings: Settings, expected: Settings) -> bool:
    """Return True if the settings contain these values. False also matches an absent key."""
    return all((settings.get(key) or False) == value for key, value in expected.items())


def _group(config: MethodConfig, key: str, raw: Json, pack_method: str) -> MethodGroup | None:
    """Return the group for a layer's settings, or None if vexport does not check their storage.

    Source: _get_scheme_cls_from_config.
    """
    values = raw if isinstance(raw, dict) else {}
    weight, inputs = _side_settings(values, "weight"), _side_settings(values, "input_tensors")
    if weight is None:
        config.add_problem(rules.QUARK_WEIGHTS, key, value=raw)
        return None
    if values.get("bias") or key == "global_quant_config" and values.get("output_tensors"):
        config.add_problem(rules.QUARK_OUTPUTS, key)
    if weight.get("dtype") in ("int4", "uint4") and inputs is None and not weight[SECOND]:
        size, symmetric = weight.get("group_size"), weight.get("symmetric") is True
        if pack_method in PACK_METHODS and isinstance(size, int) and size > 0:
            stored_as = QuarkInt4(reordered=pack_method == "reorder")
            return integer_group("quark INT4", stored_as, config, 4, size, symmetric=symmetric)
    for of_weight, of_inputs, group in _supported_kinds():
        inputs_match = (
            inputs is None if of_inputs is None else inputs is not None and _has(inputs, of_inputs)
        )
        if inputs_match and _has(weight, {SECOND: False, **of_weight}):
            return group
    config.add_problem(
        rules.QUARK_SETTINGS,
        key,
        dtypes=[each.get("dtype") for each in (weight, inputs) if each],
        qscheme=weight.get("qscheme"),
    )
    return None


def _supported_kinds() -> Iterator[tuple[Settings, Settings | None, MethodGroup]]:
    """Yield (weight settings, input settings, group) for each scheme that vLLM runs.

    The input settings are None if the inputs are not quantized.
    """
    fp4: Settings = {"dtype": "fp4", "qscheme": "per_group"}
    # The input scale has a different name than in ModelOpt.
    of_nvfp4 = ModelOptNvfp4(METHOD, names={"input_global_scale": "input_scale_2"})
    nvfp4: Settings = {**fp4, "group_size": NVFP4_GROUP, SECOND: True}
    yield nvfp4, {SECOND: True}, preset_group("quark NVFP4", of_nvfp4, "NVFP4")
    mxfp4: Settings = {**fp4, "group_size": MX_GROUP, "scale_format": "e8m0", "is_dynamic": False}
    of_mxfp4 = MethodMxfp4(METHOD, names={"weight_packed": "weight"}, least_sm=75)
    yield mxfp4, None, preset_group("quark MXFP4", of_mxfp4, "MXFP4A16")
    yield (
        mxfp4,
        {"dtype": "fp4", "is_dynamic": True},
        preset_group("quark MXFP4", of_mxfp4, "MXFP4"),
    )
    fp8: Settings = {"dtype": "fp8_e4m3"}
    blocks: Settings = {
        "qscheme": "per_block",
        "block_size": [128, 128],
        "symmetric": True,
        EXPONENTS: False,
    }
    groups: Settings = {**fp8, "qscheme": "per_group", "group_size": 128, "is_dynamic": True}
    of_blocks = MethodFp8(METHOD, least_sm=89)
    yield {**fp8, **blocks}, groups, preset_group("quark FP8 blocks", of_blocks, "FP8_BLOCK")
    static, by_token, int8 = (get_scheme(name).args for name in ("FP8", "FP8_DYNAMIC", "W8A8"))
    whole: Settings = {"qscheme": "per_tensor", "is_dynamic": False}
    rows: Settings = {"qscheme": "per_channel", "is_dynamic": False}
    dynamic: Settings = {"is_dynamic": True}
    for settings, args in ((whole, static), (rows, by_token)):
        for inputs, own in ((dynamic, by_token), (whole, static)):
            stored_as = ModelOptFp8(METHOD, least_sm=89)
            group = linear_group("quark FP8", stored_as, args.weights, own.input_activations)
            yield {**fp8, **settings}, {**fp8, **inputs}, group
    tokens = int8.input_activations
    assert tokens is not None
    one_scale = replace(tokens, strategy="tensor", dynamic=False)
    integers: Settings = {"dtype": "int8", "symmetric": True}
    by_row: Settings = {"dtype": "int8", "qscheme": "per_channel", "is_dynamic": True}
    by_tensor: Settings = {**integers, **whole}
    whole_weights = replace(int8.weights, strategy="tensor")
    for qscheme, weights in (("per_tensor", whole_weights), ("per_channel", int8.weights)):
        for inputs, own_inputs in ((by_row, tokens), (by_tensor, one_scale)):
            group = linear_group("quark INT8", QuarkInt8(METHOD), weights, own_inputs)
            yield {**integers, "qscheme": qscheme}, inputs, group


class QuarkInt8(MethodFormat, Int8):
    """Tensors weight, weight_scale (out,), and weight_zero_point, which vLLM drops."""

    unread = frozenset({"weight_zero_point", "input_zero_point"})

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        parameters = dict(super().parameters(args, shape))
        if args.weights.strategy == "channel":
            parameters["weight_scale"] = replace(
                parameters["weight_scale"], shape=shape[:1], along=(0,)
            )
        scale = parameters["weight_scale"]
        return parameters | {"weight_zero_point": exact("I8", scale.shape, along=scale.along)}


class QuarkInt4(Awq):
    """Tensors weight (in, out/8), weight_scale (groups, out) and weight_zero_point (groups, out/8).

    If `reordered`, the codes in a word have AWQ's order, otherwise plain order. Symmetric codes are
    signed.
    """

    names = {
        "weight_packed": "weight",
        "weight_scale": "weight_scale",
        "weight_zero_point": "weight_zero_point",
    }
    unread = frozenset({"weight_zero_point"})

    def __init__(self, *, reordered: bool) -> None:
        super().__init__(METHOD)
        self.positions = AWQ_POSITIONS if reordered else tuple(range(CODES))
