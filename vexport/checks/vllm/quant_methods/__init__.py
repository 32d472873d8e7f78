"""Quantization methods next to compressed-tensors that are judged: one file each, its names in `METHODS`."""

from collections.abc import Callable, Mapping

from vexport.checks.vllm.quant_methods import auto_round, awq, fp8, gptq, modelopt, mxfp4, quark
from vexport.checks.vllm.quant_methods.base import MethodFormat, MethodGroup, Model, Problem, QuantMethod
from vexport.types import Json

__all__ = ["METHODS", "MethodFormat", "MethodGroup", "Model", "Problem", "QuantMethod"]

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
