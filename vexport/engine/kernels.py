"""Tells which kernel vLLM chose for a layer, and how many bits the inputs of that kernel have."""

import re
from enum import Enum

import torch

# Packages of the classes that are kernels: vLLM's, and those that emulate them on a CPU.
_KERNELS = ("vllm.model_executor.kernels", "vexport.engine.cpu_emulation")
# Kernels that dequantize the weight and leave the input in the model's dtype, by words of their
# name.
_WEIGHT_ONLY_KERNEL = re.compile(r"Marlin|Humming|Emulation|A16", re.IGNORECASE)
# vLLM asks this kernel for inputs in MXFP4, even if the checkpoint quantizes only weights
# (compressed_tensors_w4a4_mxfp4.py). On a device without FP4 the kernel takes FP8 instead, with a
# scale for each token (check_and_fallback_input_schema in quantization/utils/humming/schema.py). An
# H100 with vLLM 0.32 did so.
_HUMMING_MXFP4, _HUMMING_MXFP4_BITS = "HummingMxFp4LinearKernel", 8
_ACTIVATION_BITS = re.compile(r"W[\dN]+A(\d+)")


def kernel_of(scheme: object) -> tuple[object, str]:
    """Return the kernel that a scheme holds, and its name.

    A MoE method holds no kernel: None, with the name of its class of experts or of its backend.
    """
    for value in vars(scheme).values():
        if type(value).__module__.startswith(_KERNELS):
            return value, type(value).__name__
    experts = vars(scheme).get("experts_cls")
    if isinstance(experts, type):
        return None, experts.__name__
    backends = (value for name, value in vars(scheme).items() if "backend" in name)
    return None, next((value.name for value in backends if isinstance(value, Enum)), "")


def activation_bits(scheme: object, kernel: object, name: str) -> int | None:
    """Return how many bits the inputs have that a kernel multiplies; None if that is unknown."""
    config = getattr(kernel, "config", None)
    dtype = getattr(config, "act_type", None)
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize * 8
    if name == _HUMMING_MXFP4 and getattr(config, "activation_quant_key", None) is not None:
        return _HUMMING_MXFP4_BITS
    if _WEIGHT_ONLY_KERNEL.search(name) or getattr(scheme, "use_a16", False):
        return 16
    key = getattr(config, "activation_quant_key", None)
    chosen = getattr(key, "dtype", None)  # not what the scheme asked for, where no kernel had that
    if isinstance(chosen, torch.dtype):
        return 4 if chosen == torch.uint8 else chosen.itemsize * 8
    # vLLM names a scheme by what it makes of activations, whatever the config says (MXFP4A16).
    named = _ACTIVATION_BITS.search(type(scheme).__name__)
    return int(named[1]) if named else None
