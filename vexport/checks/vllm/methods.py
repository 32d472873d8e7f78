"""Quantization by another method than compressed-tensors: vLLM loads it by code that is not judged here."""

from collections.abc import Iterator, Mapping

from vexport.checks.vllm.view import CheckpointView, error
from vexport.types import Finding, Json
from vexport.version import short_version

METHOD = "compressed-tensors"
# What a config of another method may have and one of compressed-tensors never has.
FOREIGN_KEYS = ("quant_algo", "quantization", "packing_format", "global_quant_config", "producer")
MODELOPT = "NVIDIA ModelOpt"
_AUTOAWQ = "convert it with compressed-tensors' AutoAWQConverter"
_MODELOPT = "convert NVFP4 with compressed-tensors' ModelOptNvfp4Converter"
_FROM_SOURCE = "quantize from the source (`vexport quantize`)"
# The methods by their names in configs: who writes them, and how a checkpoint in compressed-tensors is had.
PRODUCERS: Mapping[str, tuple[str, str]] = {
    "auto-round": ("AutoRound", "export it again with AutoRound's format llm_compressor"),
    "auto_awq": ("AutoAWQ", _AUTOAWQ),
    "auto_gptq": ("AutoGPTQ", _FROM_SOURCE),
    "awq": ("AutoAWQ, AutoRound or GPTQModel", _AUTOAWQ),
    "bitsandbytes": ("bitsandbytes", _FROM_SOURCE),
    "fbgemm_fp8": ("FBGEMM", _FROM_SOURCE),
    "fp8": ("a model that is published in FP8, such as DeepSeek's", _FROM_SOURCE),
    "fp_quant": ("FP-Quant", _FROM_SOURCE),
    "gguf": ("llama.cpp", _FROM_SOURCE),
    "gptq": ("GPTQModel, AutoGPTQ or AutoRound", _FROM_SOURCE),
    "inc": ("Intel Neural Compressor", "export it again with AutoRound's format llm_compressor"),
    "modelopt": (MODELOPT, _MODELOPT),
    "modelopt_fp4": (MODELOPT, _MODELOPT),
    "modelopt_mixed": (MODELOPT, _FROM_SOURCE),
    "modelopt_mxfp8": (MODELOPT, _FROM_SOURCE),
    "mxfp4": ("OpenAI's gpt-oss", _FROM_SOURCE),
    "mxfp8": ("a model that is published in MXFP8", _FROM_SOURCE),
    "quark": ("AMD Quark", _FROM_SOURCE),
    "torchao": ("TorchAO", _FROM_SOURCE),
}
# Those that `PINNED` has not (QuantizationMethods in model_executor/layers/quantization/__init__.py, and
# what `override_quantization_method` of its classes takes for one of them).
UNKNOWN_TO_VLLM = frozenset({"bitsandbytes", "gguf"})


def other_method(view: CheckpointView) -> str | None:
    """The name of the method, where the checkpoint is plainly not one of compressed-tensors.

    A config with compressed-tensors' keys is its own, whatever method it names: that is a mistake.
    """
    config = view.quantization
    if config is None or is_ours(config):
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


def findings(view: CheckpointView, method: str, check: str) -> Iterator[Finding]:
    """The one finding on a checkpoint of another method."""
    producer, way = PRODUCERS.get(method, ("an unknown producer", _FROM_SOURCE))
    loads = method in PRODUCERS and method not in UNKNOWN_TO_VLLM
    does = (
        "which vLLM may well load, by other code than is judged here"
        if loads
        else f"which vLLM {short_version()} has not"
    )
    ask = "ask vLLM itself with `vexport load` (also --dry); to have it judged, " if loads else ""
    yield error(
        check,
        view.quantization_place,
        expected=f"{METHOD}, the only method that vexport judges",
        got=f"{method!r} (of {producer}), {does}",
        fix=f"{ask}{way}",
    )


def _is_modelopt(config: Mapping[str, Json]) -> bool:
    """Whether ModelOpt wrote a config without a method (_normalize_quantization_config)."""
    producer = config.get("producer")
    named = isinstance(producer, dict) and producer.get("name") == "modelopt"
    return named or isinstance(config.get("quantization"), dict)
