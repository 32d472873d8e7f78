"""Quantization methods next to compressed-tensors: the judged ones, one file each."""

from collections.abc import Callable, Mapping

from vexport.checks.vllm.quant_methods import auto_round, awq, fp8, gptq, modelopt, mxfp4, quark
from vexport.checks.vllm.quant_methods.base import Model, QuantMethod
from vexport.records import Json

# By the name in configs: reads the config, next to the model's.
METHODS: Mapping[str, Callable[[Mapping[str, Json], Model], QuantMethod]] = {
    "auto-round": auto_round.read,
    "auto_awq": awq.read,
    "auto_gptq": gptq.read,
    "awq": awq.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "inc": auto_round.read,
    "modelopt": modelopt.read,
    "modelopt_fp4": modelopt.read,
    "modelopt_mixed": modelopt.read,
    "modelopt_mxfp8": modelopt.read,
    "mxfp4": mxfp4.read,
    "quark": quark.read,
}
METHOD = "compressed-tensors"
# What a config of another method may have and one of compressed-tensors never has.
FOREIGN_KEYS = ("quant_algo", "quantization", "packing_format", "global_quant_config", "producer")
# Methods of vLLM and of others that are not judged.
OTHERS = ("bitsandbytes", "fbgemm_fp8", "fp_quant", "gguf", "mxfp8", "torchao")


def method_name(config: Mapping[str, Json]) -> str | None:
    """The name of the method, where a config is plainly not one of compressed-tensors.

    A config with compressed-tensors' keys is its own, whatever method it names: that is a mistake.
    """
    if is_ours(config):
        return None
    method = config.get("quant_method")
    if not isinstance(method, str):
        return "modelopt" if _is_modelopt(config) else None
    name = method.lower().replace("_", "-")
    listed = next((known for known in (*METHODS, *OTHERS) if known.replace("_", "-") == name), None)
    return listed or (None if name == METHOD else method)


def is_ours(config: Mapping[str, Json]) -> bool:
    """Return whether the keys of a config are compressed-tensors': groups with a format, and nobody
    else's."""
    groups = isinstance(config.get("config_groups"), dict) and isinstance(config.get("format"), str)
    return groups and not any(key in config for key in FOREIGN_KEYS)


def _is_modelopt(config: Mapping[str, Json]) -> bool:
    """Return whether ModelOpt wrote a config without a method (_normalize_quantization_config)."""
    producer = config.get("producer")
    named = isinstance(producer, dict) and producer.get("name") == "modelopt"
    return named or isinstance(config.get("quantization"), dict)
