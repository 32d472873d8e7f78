"""Quantization methods next to compressed-tensors that are judged: one file each, its names in `METHODS`."""

from collections.abc import Callable, Mapping, Set

from vexport.checks.vllm.quant_methods import awq, fp8, gptq, modelopt
from vexport.checks.vllm.quant_methods.base import MethodFormat, MethodGroup, Problem, QuantMethod
from vexport.types import Json

__all__ = ["METHODS", "MethodFormat", "MethodGroup", "Problem", "QuantMethod"]

# By the name in configs: reads the config, given the modules that the checkpoint stores quantized.
METHODS: Mapping[str, Callable[[Mapping[str, Json], Set[str]], QuantMethod]] = {
    "auto_awq": awq.read,
    "auto_gptq": gptq.read,
    "awq": awq.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "modelopt": modelopt.read,
    "modelopt_fp4": modelopt.read,
    "modelopt_mixed": modelopt.read,
    "modelopt_mxfp8": modelopt.read,
}
