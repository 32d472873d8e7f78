"""`modelopt`: FP8, NVFP4 and MXFP8 as stored by NVIDIA ModelOpt, also mixed by layer.

Source: vllm/model_executor/layers/quantization/modelopt.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vexport.checkpoint.reader import Derived, Reader
from vexport.checks.vllm.quant_methods.base import (
    MethodConfig,
    MethodFormat,
    MethodGroup,
    MethodMxfp8,
    QuantMethod,
    Translation,
    contains_listed,
    is_listed,
    preset_group,
)
from vexport.formats.arguments import Arguments
from vexport.formats.base import Parameter
from vexport.formats.fp8 import Fp8
from vexport.formats.nvfp4 import Nvfp4
from vexport.numerics import NVFP4_GROUP
from vexport.records import Json, TensorInfo
from vexport.rules import config as rules

if TYPE_CHECKING:
    from vexport.checks.vllm.quant_methods.integers import Array

METHOD, SOURCE = "modelopt", "modelopt.py"
NVFP4_ALGOS = ("NVFP4", "W4A16_NVFP4")
MIXED = "MIXED_PRECISION"
# Layers with these parts in their names are never quantized, even if the list does not contain
# them.
VISION = ("vision_tower", "vision_model", "vit_large_projector")
# The first vLLM version that reads `exclude_modules` if a config has no `ignore`, as in some
# exports.
EXCLUDE_MODULES_FROM = (0, 33)
# Keys that the older config file needs for NVFP4.
NVFP4_KEYS = ("group_size", "kv_cache_quant_algo", "exclude_modules")


class ModelOptFp8(MethodFormat, Fp8):
    """Tensors weight, weight_scale and, if inputs have one static scale, input_scale."""

    def parameters(self, args: Arguments, shape: tuple[int, int]) -> Mapping[str, Parameter]:
        """Return the tensors of a layer.

        Scales per channel have the shape (out,), and scales per block (rows, 1, columns, 1).
        """
        parameters = dict(super().parameters(args, shape))
        scale = parameters["weight_scale"]
        if args.weights.strategy == "channel":
            parameters["weight_scale"] = replace(scale, shape=scale.shape[:1], along=(0,))
        elif args.weights.strategy == "block":
            rows, columns = scale.shape
            parameters["weight_scale"] = replace(scale, shape=(rows, 1, columns, 1), along=(0,))
        return parameters


class ModelOptNvfp4(MethodFormat, Nvfp4):
    """Tensors weight (two codes per byte), weight_scale, weight_scale_2 and input_scale.

    weight_scale_2 and input_scale are absmax/(448*6).
    """

    names = {
        "weight_packed": "weight",
        "weight_global_scale": "weight_scale_2",
        "input_global_scale": "input_scale",
    }
    reciprocals = frozenset({"weight_global_scale", "input_global_scale"})

    def translated(self, args: Arguments, stored: Mapping[str, TensorInfo]) -> Translation:
        """Return the translated tensors. Global scales are the reciprocals of ModelOpt's scales."""
        tensors = dict(super().translated(args, stored))
        for name in self.reciprocals & tensors.keys():
            tensor = stored[self.names[name]]
            tensors[name] = Derived(
                dtype="F32", shape=(1,), sources=(tensor,), rows=partial(_reciprocal, tensor)
            )
        return tensors


class WeightOnlyNvfp4(ModelOptNvfp4):
    """W4A16_NVFP4. vLLM drops the input_scale of older exports."""

    unread = frozenset({"input_scale"})


# SM 80 by ModelOptFp8Config.get_min_capability.
_FP8 = ModelOptFp8(METHOD, least_sm=80)
# ModelOpt's algorithms: each with its storage format and the preset with its arguments.
ALGOS: Mapping[str, tuple[MethodFormat, str]] = {
    "FP8": (_FP8, "FP8"),
    "FP8_PER_CHANNEL_PER_TOKEN": (_FP8, "FP8_DYNAMIC"),
    "FP8_PB_WO": (_FP8, "FP8_BLOCK"),
    "NVFP4": (ModelOptNvfp4(METHOD), "NVFP4"),
    "W4A16_NVFP4": (WeightOnlyNvfp4(METHOD), "NVFP4A16"),
    "MXFP8": (MethodMxfp8(METHOD), "MXFP8"),
}


def _reciprocal(tensor: TensorInfo, reader: Reader, rows: slice) -> "Array":
    """Return float32 values with the stored values as their reciprocals, if there are any.

    vLLM computes the reciprocals of the result in float32. The rounded reciprocal of a stored value
    may have another reciprocal than the stored value. Its two neighbours in float32 are then tried.
    """
    stored = reader.floats(tensor).reshape(-1).astype(np.float32)
    one = np.float32(1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = one / stored
        for other in (
            np.nextafter(inverse, np.float32(0)),
            np.nextafter(inverse, np.float32(np.inf)),
        ):
            inverse = np.where((one / inverse != stored) & (one / other == stored), other, inverse)
    return inverse[rows]


def read(config: MethodConfig) -> QuantMethod:
    """Return the method as vLLM reads it, from config.json or the older hf_quant_config.json."""
    values = config.values
    older = values.get("quantization")
    inner: Mapping[str, Json] = older if isinstance(older, dict) else values
    keys = "quantization." if isinstance(older, dict) else ""
    algo = str(inner.get("quant_algo") or "").upper()
    if algo not in (*ALGOS, MIXED):
        stored, choices = inner.get("quant_algo"), (*ALGOS, MIXED)
        config.add_problem(rules.CHOICE, f"{keys}quant_algo", value=stored, choices=choices)
    missing = (
        [key for key in NVFP4_KEYS if key not in inner] if keys and algo in NVFP4_ALGOS else []
    )
    if missing:
        config.add_problem(rules.NVFP4_KEYS, keys.rstrip("."), missing=missing, keys=NVFP4_KEYS)
    size = inner.get("group_size")
    if algo in NVFP4_ALGOS and size not in (None, NVFP4_GROUP):
        key = f"{keys}group_size"
        config.add_problem(rules.NVFP4_GROUP_SIZE, key, value=size, size=NVFP4_GROUP)
    if algo == "NVFP4" and _is_weight_only(values):
        algo = "W4A16_NVFP4"
    skip_key = "exclude_modules" if keys else "ignore"
    if skip_key not in inner and config.version >= EXCLUDE_MODULES_FROM:
        skip_key = "exclude_modules"
    listed = inner.get(skip_key, [])
    if not isinstance(listed, list):
        config.add_problem(rules.LIST_OF_NAMES, f"{keys}{skip_key}", value=listed)
    kept = tuple(map(str, listed)) if isinstance(listed, list) else ()
    groups = {algo: preset_group(algo, *ALGOS[algo])} if algo in ALGOS else {}
    layers = _layers(config, inner, keys) if algo == MIXED else {}
    groups |= {each: preset_group(each, *ALGOS[each]) for each in layers.values()}

    def group_of(layer: str, name: str) -> MethodGroup | None:
        if is_excluded(layer, name, kept):
            return None
        return groups.get(_algo_of(layer, name, layers) if algo == MIXED else algo)

    return QuantMethod(
        name=METHOD,
        skip_key=f"{keys}{skip_key}",
        groups=tuple(groups.values()),
        group_of=group_of,
        quantizes_head=True,
        kv_cache=_has_fp8_cache(inner, older=bool(keys)),
        pairs_cache_scales=True,
    )


def is_excluded(layer: str, name: str, kept: tuple[str, ...]) -> bool:
    """Return True if a layer is excluded from quantization (is_layer_excluded).

    The list can contain the layer's name, a part of vLLM's name, or a wildcard. Vision towers are
    always excluded.
    """
    if layer in kept or is_listed(name, kept) or contains_listed(layer, kept):
        return True
    wild = any(fnmatch(layer, entry) for entry in kept)
    return wild or contains_listed(layer, VISION)


def _is_weight_only(values: Mapping[str, Json]) -> bool:
    """Return True if the config groups quantize no inputs (ModelOptNvFp4Config._from_config)."""
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return False
    return all(
        isinstance(group, dict) and group.get("input_activations") is None
        for group in groups.values()
    )


def _has_fp8_cache(inner: Mapping[str, Json], *, older: bool) -> bool:
    if older:
        return str(inner.get("kv_cache_quant_algo")).upper() == "FP8"
    scheme = inner.get("kv_cache_scheme")
    return isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)


def _layers(config: MethodConfig, inner: Mapping[str, Json], keys: str) -> dict[str, str]:
    listed, algos = inner.get("quantized_layers"), dict[str, str]()
    if not isinstance(listed, dict) or not listed:
        key = f"{keys}quantized_layers"
        config.add_problem(rules.MIXED_LAYERS, key, value=listed, algo=MIXED)
        return algos
    for name, recipe in listed.items():
        algo = str(recipe.get("quant_algo")).upper() if isinstance(recipe, dict) else "none"
        if algo in ALGOS:
            algos[name] = algo
        else:
            key = f"{keys}quantized_layers.{name}"
            config.add_problem(rules.LAYER_ALGORITHM, key, algo=algo, choices=tuple(ALGOS))
    return algos


def _algo_of(layer: str, name: str, layers: Mapping[str, str]) -> str:
    """Return the algorithm of a layer, or "" if it has none (_resolve_quant_algo).

    The layer is listed under vLLM's name or the member's name. Experts may be listed one by one.
    """
    below = (algo for entry, algo in layers.items() if entry.startswith(f"{layer}."))
    return layers.get(layer) or layers.get(name) or next(below, "")
