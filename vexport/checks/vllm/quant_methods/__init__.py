"""Quantization methods next to compressed-tensors: the judged ones, one file each, and who writes which."""

from collections.abc import Callable, Mapping

from vexport.checks.vllm.quant_methods import auto_round, awq, fp8, gptq, modelopt, mxfp4, quark
from vexport.checks.vllm.quant_methods.base import Model, QuantMethod
from vexport.types import Json

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
MODELOPT = "NVIDIA ModelOpt"
FROM_SOURCE = "quantize from the source (`vexport quantize`)"
# The methods by their names in configs: who writes them, and how a checkpoint in compressed-tensors is had.
PRODUCERS: Mapping[str, tuple[str, str]] = {
    "auto-round": ("AutoRound", FROM_SOURCE),
    "auto_awq": ("AutoAWQ", FROM_SOURCE),
    "auto_gptq": ("AutoGPTQ", FROM_SOURCE),
    "awq": ("AutoAWQ, AutoRound or GPTQModel", FROM_SOURCE),
    "bitsandbytes": ("bitsandbytes", FROM_SOURCE),
    "fbgemm_fp8": ("FBGEMM", FROM_SOURCE),
    "fp8": ("a model that is published in FP8, such as DeepSeek's", FROM_SOURCE),
    "fp_quant": ("FP-Quant", FROM_SOURCE),
    "gguf": ("llama.cpp", FROM_SOURCE),
    "gptq": ("GPTQModel, AutoGPTQ or AutoRound", FROM_SOURCE),
    "inc": ("AutoRound", FROM_SOURCE),
    "modelopt": (MODELOPT, FROM_SOURCE),
    "modelopt_fp4": (MODELOPT, FROM_SOURCE),
    "modelopt_mixed": (MODELOPT, FROM_SOURCE),
    "modelopt_mxfp8": (MODELOPT, FROM_SOURCE),
    "mxfp4": ("OpenAI's gpt-oss", FROM_SOURCE),
    "mxfp8": ("a model that is published in MXFP8", FROM_SOURCE),
    "quark": ("AMD Quark", FROM_SOURCE),
    "torchao": ("TorchAO", FROM_SOURCE),
}
# Names in configs that vLLM takes for its own (`override_quantization_method` of its classes).
TAKEN_AS: Mapping[str, str] = {"auto-round": "inc", "auto_awq": "awq", "auto_gptq": "gptq"}


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
    listed = next((producer for producer in PRODUCERS if producer.replace("_", "-") == name), None)
    return listed or (None if name == METHOD else method)


def is_ours(config: Mapping[str, Json]) -> bool:
    """Whether the keys of a config are compressed-tensors': groups with a format, and nobody else's."""
    groups = isinstance(config.get("config_groups"), dict) and isinstance(config.get("format"), str)
    return groups and not any(key in config for key in FOREIGN_KEYS)


def _is_modelopt(config: Mapping[str, Json]) -> bool:
    """Whether ModelOpt wrote a config without a method (_normalize_quantization_config)."""
    producer = config.get("producer")
    named = isinstance(producer, dict) and producer.get("name") == "modelopt"
    return named or isinstance(config.get("quantization"), dict)
