"""`quark`: FP8, INT8, INT4, MXFP4 and NVFP4 as AMD Quark stores them, also by layer.

Source: vllm/model_executor/layers/quantization/quark/quark.py and schemes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import TypeGuard

from vexport.checks.vllm.quant_methods.awq import PLACES, Awq
from vexport.checks.vllm.quant_methods.base import (
    MethodConfig,
    MethodFormat,
    MethodGroup,
    Model,
    QuantMethod,
    linear_group,
)
from vexport.checks.vllm.quant_methods.integers import integer_group
from vexport.checks.vllm.quant_methods.modelopt import ModelOptFp8, ModelOptNvfp4
from vexport.formats import FP8, INT8, MXFP4, NVFP4
from vexport.formats.arguments import Arguments
from vexport.formats.base import Parameter, exact
from vexport.formats.fp8 import Fp8
from vexport.formats.integer import Int8
from vexport.formats.mxfp import Mxfp4
from vexport.formats.schemes import get_scheme
from vexport.numerics.constants import MX_GROUP, NVFP4_GROUP
from vexport.records import Json
from vexport.records.patterns import Patterns

SOURCE = "quark/quark.py"
JUDGED = "FP8, INT8, INT4 in groups, MXFP4 and NVFP4 as vLLM runs them"
FP8_BLOCK: Json = [128, 128]
BLOCK_COLUMNS = 128
PACK_METHODS = ("order", "reorder")
# Names of the scales of the KV cache (get_cache_scale_mapper).
CACHE_SCALES = {"k_scale": "k_proj.output_scale", "v_scale": "v_proj.output_scale"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The quantization of weights or inputs; with `second`, the scale of the scales."""

    values: Mapping[str, Json]
    second: Mapping[str, Json] | None = None

    def has(self, **expected: Json) -> bool:
        """Return whether the keys have these values; False stands for absent too."""
        return all((self.values.get(key) or False) == value for key, value in expected.items())


def read(values: Mapping[str, Json], model: Model) -> QuantMethod:
    """The method as vLLM reads it: by layer's name, else the global one; the output head never."""
    config = MethodConfig(values, SOURCE)
    export = values.get("export")
    if not isinstance(export, dict):
        config.wrong("export", f"the key, without which vLLM does not start ({SOURCE})", repr(export))
    exported: Mapping[str, Json] = export if isinstance(export, dict) else {}
    method = str(exported.get("pack_method"))
    kept = Patterns(config.names("exclude"))
    layers, base = values.get("layer_quant_config"), values.get("global_quant_config")
    cached = exported.get("kv_cache_group")
    _cache(config, cached, layers)
    groups: dict[str, MethodGroup] = {}
    by_layer = {
        name: _group(config, f"layer_quant_config.{name}", each, method) for name, each in _dicts(layers)
    }
    usual = _group(config, "global_quant_config", base, method)
    for group in (usual, *by_layer.values()):
        if group is not None:
            groups.setdefault(group.name, group)

    def group_of(layer: str, name: str) -> MethodGroup | None:
        experts = layer.endswith(".experts")
        below = experts and any(entry.startswith(f"{layer}.") for entry in kept)
        if below or kept.match(layer) or kept.match(name):
            return None
        return next((group for entry, group in by_layer.items() if _names(entry, name)), usual)

    return QuantMethod(
        name="quark",
        source=SOURCE,
        skip_key="exclude",
        groups=tuple(groups.values()),
        group_of=group_of,
        kv_cache=bool(cached),
        cache_scales=CACHE_SCALES,
        problems=tuple(config.problems),
    )


def _cache(config: MethodConfig, cached: Json, layers: Json) -> None:
    """The settings of the KV cache are the outputs' of its layers (from_config, validate_kv_cache_config)."""
    patterns = [str(each) for each in cached] if isinstance(cached, list) else []
    named = [each for name, each in _dicts(layers) if any(fnmatch(name, pattern) for pattern in patterns)]
    sides = [Side(values=each["output_tensors"]) for each in named if _has_outputs(each)]
    if patterns and (
        not sides or any(not side.has(dtype="fp8_e4m3", qscheme="per_tensor") for side in sides)
    ):
        expected = "layers of layer_quant_config with output_tensors in fp8_e4m3, per tensor"
        config.wrong("export.kv_cache_group", expected, f"{', '.join(patterns)}, which have none"[:120])


def _has_outputs(raw: Json) -> TypeGuard[dict[str, dict[str, Json]]]:
    return isinstance(raw, dict) and isinstance(raw.get("output_tensors"), dict)


def _dicts(value: Json) -> Iterator[tuple[str, Json]]:
    yield from value.items() if isinstance(value, dict) else ()


def _names(entry: str, name: str) -> bool:
    """Return whether an entry of layer_quant_config is of a layer (get_layer_quant_config_from_name)."""
    return fnmatch(name, entry) if "*" in entry else name in entry


def _sides(raw: Json) -> Iterator[Side | None]:
    """Weights and inputs; a list of one is that one."""
    for key in ("weight", "input_tensors"):
        value = raw.get(key) if isinstance(raw, dict) else None
        listed = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]
        yield Side(values=listed[0], second=listed[1] if len(listed) > 1 else None) if listed else None


def _group(config: MethodConfig, key: str, raw: Json, pack_method: str) -> MethodGroup | None:
    """Return how layers are stored, by what vLLM tells from the config (_get_scheme_cls_from_config)."""
    weight, inputs = _sides(raw)
    if weight is None:
        config.wrong(key, "weights that are quantized", repr(raw)[:80])
        return None
    if isinstance(raw, dict) and (
        raw.get("bias") or key == "global_quant_config" and raw.get("output_tensors")
    ):
        config.wrong(key, "no quantized outputs or biases", "some, which vLLM refuses")
    found = _kind(config, weight, inputs, pack_method)
    if found is None:
        sides = [str(each.values.get("dtype")) for each in (weight, inputs) if each]
        got = f"{' with inputs of '.join(sides)}, {weight.values.get('qscheme')}"
        config.wrong(key, JUDGED, got, "ask vLLM with `vexport load`")
    return found


def _kind(config: MethodConfig, weight: Side, inputs: Side | None, pack_method: str) -> MethodGroup | None:
    if weight.second is not None:
        return _nvfp4(weight, inputs)
    if weight.has(dtype="fp8_e4m3") and inputs is not None and inputs.has(dtype="fp8_e4m3"):
        return _fp8(weight, inputs)
    if weight.has(dtype="int8", symmetric=True) and inputs is not None and inputs.has(dtype="int8"):
        return _int8(weight, inputs)
    if weight.values.get("dtype") in ("int4", "uint4") and inputs is None and pack_method in PACK_METHODS:
        size, symmetric = weight.values.get("group_size"), weight.values.get("symmetric") is True
        if not isinstance(size, int) or size <= 0:
            return None
        stored_as = QuarkInt4(reordered=pack_method == "reorder")
        return integer_group("quark INT4", stored_as, config, 4, size, symmetric=symmetric)
    if weight.has(
        dtype="fp4", qscheme="per_group", group_size=MX_GROUP, scale_format="e8m0", is_dynamic=False
    ):
        own = inputs is None or inputs.has(dtype="fp4", is_dynamic=True)
        args = get_scheme("MXFP4A16" if inputs is None else "MXFP4").args
        return (
            linear_group("quark MXFP4", QuarkMxfp4(), args.weights, args.input_activations, MXFP4)
            if own
            else None
        )
    return None


def _nvfp4(weight: Side, inputs: Side | None) -> MethodGroup | None:
    args = get_scheme("NVFP4").args
    grouped = weight.has(dtype="fp4", qscheme="per_group", group_size=NVFP4_GROUP)
    if not grouped or inputs is None or inputs.second is None:
        return None
    return linear_group("quark NVFP4", QuarkNvfp4(), args.weights, args.input_activations, NVFP4)


def _fp8(weight: Side, inputs: Side) -> MethodGroup | None:
    """Per tensor or channel with inputs per tensor or token; blocks with inputs by group."""
    if weight.has(qscheme="per_block", block_size=FP8_BLOCK, symmetric=True):
        args = get_scheme("FP8_BLOCK").args
        dynamic = inputs.has(qscheme="per_group", group_size=BLOCK_COLUMNS, is_dynamic=True)
        plain = dynamic and not weight.has(scale_type="float8_e8m0fnu")
        return (
            linear_group("quark FP8 blocks", QuarkFp8Block(), args.weights, args.input_activations, FP8)
            if plain
            else None
        )
    static, by_token = get_scheme("FP8").args, get_scheme("FP8_DYNAMIC").args
    if not weight.has(is_dynamic=False) or weight.values.get("qscheme") not in ("per_tensor", "per_channel"):
        return None
    weights = (static if weight.has(qscheme="per_tensor") else by_token).weights
    of_inputs = by_token.input_activations
    if not inputs.has(is_dynamic=True):
        if not inputs.has(qscheme="per_tensor"):
            return None
        of_inputs = static.input_activations
    return linear_group("quark FP8", QuarkFp8(), weights, of_inputs, FP8)


def _int8(weight: Side, inputs: Side) -> MethodGroup | None:
    """Per channel with inputs by token, or static per tensor."""
    args = get_scheme("W8A8").args
    by_token = inputs.has(qscheme="per_channel", is_dynamic=True)
    static = inputs.has(qscheme="per_tensor", is_dynamic=False, symmetric=True)
    if weight.values.get("qscheme") not in ("per_tensor", "per_channel") or not (by_token or static):
        return None
    of_inputs = args.input_activations
    assert of_inputs is not None
    if static:
        of_inputs = replace(of_inputs, strategy="tensor", dynamic=False)
    weights = args.weights if weight.has(qscheme="per_channel") else replace(args.weights, strategy="tensor")
    return linear_group("quark INT8", QuarkInt8(), weights, of_inputs, INT8)


class QuarkFp8(ModelOptFp8):
    """weight, weight_scale (out,) or one number, input_scale where inputs are static."""

    name = "quark"
    least_sm = 89


class QuarkFp8Block(MethodFormat, Fp8):
    """weight and weight_scale as compressed-tensors has them."""

    name = "quark"
    least_sm = 89


class QuarkInt8(MethodFormat, Int8):
    """weight, weight_scale (out,); weight_zero_point, which vLLM drops."""

    name = "quark"
    unread = frozenset({"weight_zero_point", "input_zero_point"})

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        found = dict(super().parameters(args, shape))
        if args.weights.strategy == "channel":
            found["weight_scale"] = replace(found["weight_scale"], shape=shape[:1], along=(0,))
        scale = found["weight_scale"]
        return found | {"weight_zero_point": exact("I8", scale.shape, along=scale.along)}


class QuarkMxfp4(MethodFormat, Mxfp4):
    """weight (two codes a byte) and weight_scale; Marlin takes SM 75, and the scheme asks for no more."""

    name = "quark"
    weight = "weight"
    names = {"weight_packed": "weight"}
    least_sm = 75


class QuarkNvfp4(ModelOptNvfp4):
    """As ModelOpt, but for the name of the inputs' scale."""

    name = "quark"
    names = {**ModelOptNvfp4.names, "input_global_scale": "input_scale_2"}


class QuarkInt4(Awq):
    """weight (in, out/8), weight_scale and weight_zero_point (groups, out) as AWQ has them.

    `reordered` is AWQ's order of codes in a word, else they follow each other; symmetric codes have a sign.
    """

    name = "quark"
    weight = "weight"
    names = {
        "weight_packed": "weight",
        "weight_scale": "weight_scale",
        "weight_zero_point": "weight_zero_point",
    }
    unread = frozenset({"weight_zero_point"})

    def __init__(self, *, reordered: bool) -> None:
        self.reordered = reordered
        self.places = PLACES if reordered else tuple(range(8))
