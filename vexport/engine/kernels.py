"""Find the kernel that vLLM chose for a layer, its inputs, and the libraries that compile it."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from functools import cache

import torch

# Packages with kernel classes: vLLM's kernels, and kernels that emulate them on a CPU.
_KERNELS = ("vllm.model_executor.kernels", "vexport.engine.cpu_emulation")
# Words in the names of kernels that dequantize the weight and leave the input in the model's dtype.
# vexport's emulation also matches. Some of its kernels round the input as the config requires.
_WEIGHT_ONLY_KERNEL = re.compile(r"Marlin|Humming|Emulation|A16", re.IGNORECASE)
# vLLM configures this kernel to round inputs to MXFP4, even if the checkpoint quantizes only
# weights (compressed_tensors_w4a4_mxfp4.py). On a device without FP4 the kernel uses FP8 instead,
# with a scale for each token (check_and_fallback_input_schema in
# quantization/utils/humming/schema.py). An H100 with vLLM 0.32 did so.
_HUMMING_MXFP4, _HUMMING_MXFP4_BITS = "HummingMxFp4LinearKernel", 8
_ACTIVATION_BITS = re.compile(r"W[\dN]+A(\d+)")
# Words in the paths of modules that compile kernels on the host.
_LIBRARIES = {
    "flashinfer": "FlashInfer",
    "deepgemm": "DeepGEMM",
    "humming": "Humming",
    "triton": "Triton",
}
# Functions of vLLM that only ask for a library.
_ASKS = re.compile(r"\.(is|has)_\w+$")


def kernel_of(scheme: object) -> tuple[object, str]:
    """Return the kernel of a scheme, and the kernel's name.

    A MoE method has no kernel. For such a method, return its class of experts, or None and the name
    of its backend.
    """
    for value in vars(scheme).values():
        if type(value).__module__.startswith(_KERNELS):
            return value, type(value).__name__
    experts = vars(scheme).get("experts_cls")
    if isinstance(experts, type):
        return experts, experts.__name__
    backends = (value for name, value in vars(scheme).items() if "backend" in name)
    return None, next((value.name for value in backends if isinstance(value, Enum)), "")


def activation_bits(scheme: object, kernel: object, name: str) -> int | None:
    """Return the number of bits of a kernel's inputs, or None if it is unknown."""
    config = getattr(kernel, "config", None)
    dtype = getattr(config, "act_type", None)
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize * 8
    if name == _HUMMING_MXFP4 and getattr(config, "activation_quant_key", None) is not None:
        return _HUMMING_MXFP4_BITS
    if _WEIGHT_ONLY_KERNEL.search(name) or getattr(scheme, "use_a16", False):
        return 16
    key = getattr(config, "activation_quant_key", None)
    chosen = getattr(key, "dtype", None)  # may differ from the scheme's dtype
    if isinstance(chosen, torch.dtype):
        return 4 if chosen == torch.uint8 else chosen.itemsize * 8
    # The name of vLLM's scheme has the bits that vLLM uses for activations, even if the config
    # differs (MXFP4A16).
    named = _ACTIVATION_BITS.search(type(scheme).__name__)
    return int(named[1]) if named else None


@cache
def compiling_libraries(of: type | None, name: str) -> tuple[str, ...]:
    """Return the libraries that compile the kernels of a class of vLLM on the host.

    These are the libraries that the code of the class and of its bases calls. Without a class, the
    name of a backend (FLASHINFER_CUTLASS) tells the library.
    """
    paths = [name]
    for each in () if of is None else of.__mro__:
        if each.__module__.startswith("vllm."):
            paths += [each.__module__, each.__name__, *_called_modules(each)]
    text = " ".join(paths).replace("_", "").casefold()
    return tuple(library for word, library in _LIBRARIES.items() if word in text)


def _called_modules(of: type) -> Iterator[str]:
    """Yield the modules of the names that the code of a class uses."""
    tree = ast.parse(inspect.getsource(sys.modules[of.__module__]))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    body = next((node for node in found if node.name == of.__name__), None)
    if body is None:
        return
    used = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    for node in (*tree.body, *ast.walk(body)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = (getattr(node, "module", None) or "") + "."
            for alias in node.names:
                if (alias.asname or alias.name).partition(".")[0] in used:
                    path = f"{module}{alias.name}".lstrip(".")
                    if not _ASKS.search(path):
                        yield path
