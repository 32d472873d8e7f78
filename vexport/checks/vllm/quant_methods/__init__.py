"""Quantization methods besides compressed-tensors that vexport checks, one file each."""

from collections.abc import Mapping, Set
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from vexport.records import Json
from vexport.version import Version

if TYPE_CHECKING:
    from vexport.checks.vllm.quant_methods.base import QuantMethod

# Maps the method's name in configs to a module of this package. A module is imported when its
# method is used.
METHODS: Mapping[str, str] = {
    "auto-round": "auto_round",
    "auto_awq": "integers",
    "auto_gptq": "gptq",
    "awq": "integers",
    "fp8": "fp8",
    "gptq": "gptq",
    "inc": "auto_round",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "mxfp4": "mxfp4",
    "quark": "quark",
}
COMPRESSED_TENSORS = "compressed-tensors"
# Keys of other methods that compressed-tensors never has.
FOREIGN_KEYS = ("quant_algo", "quantization", "packing_format", "global_quant_config", "producer")
# Methods that are not checked.
UNCHECKED_METHODS = ("bitsandbytes", "fbgemm_fp8", "fp_quant", "gguf", "mxfp8", "torchao")


def method_name(config: Mapping[str, Json]) -> str | None:
    """Return the name of the quantization method, or None for compressed-tensors.

    A config with compressed-tensors' keys belongs to compressed-tensors. If it names another
    method, that name is a mistake.
    """
    if is_compressed_tensors(config):
        return None
    method = config.get("quant_method")
    if not isinstance(method, str):
        return "modelopt" if _is_modelopt(config) else None
    name = method.lower().replace("_", "-")
    known_methods = {known.replace("_", "-"): known for known in (*UNCHECKED_METHODS, *METHODS)}
    return known_methods.get(name) or (None if name == COMPRESSED_TENSORS else method)


def read_method(
    name: str,
    values: Mapping[str, Json],
    model: Mapping[str, Json],
    quantized: Set[str],
    version: Version,
) -> "QuantMethod":
    """Read the config of a method in METHODS as the given version of vLLM does.

    `values` is the quantization config, `model` the whole config.json, and `quantized` the names of
    the modules that are stored quantized.
    """
    base, module = (import_module(f"{__name__}.{file}") for file in ("base", METHODS[name]))
    config = base.MethodConfig(values, module.SOURCE, model, quantized, version)
    method: QuantMethod = replace(
        module.read(config), source=module.SOURCE, problems=tuple(config.problems)
    )
    return method


def is_compressed_tensors(config: Mapping[str, Json]) -> bool:
    """Return True if a config has the keys of compressed-tensors and no keys of other methods."""
    groups = isinstance(config.get("config_groups"), dict) and isinstance(config.get("format"), str)
    return groups and not any(key in config for key in FOREIGN_KEYS)


def _is_modelopt(config: Mapping[str, Json]) -> bool:
    """Return True if ModelOpt wrote a config without a method (_normalize_quantization_config)."""
    producer = config.get("producer")
    named = isinstance(producer, dict) and producer.get("name") == "modelopt"
    return named or isinstance(config.get("quantization"), dict)
