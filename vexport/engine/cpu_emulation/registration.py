"""Puts the emulation kernels into vLLM's tables. Imported only inside vLLM's processes."""

from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import (
    EmulationMxfp8LinearKernel,
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
    register_linear_kernel,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4 as nvfp4_scheme,
)
from vllm.platforms import PlatformEnum

from vexport.engine.cpu_emulation.kernels import (
    EmulationMxFp4A16Linear,
    EmulationNvFp4A16Linear,
    EmulationNvFp4Linear,
    EmulationStaticFp8Linear,
    EmulationW8A16Fp8Linear,
)


def register_kernels() -> None:
    """Offer a kernel for every scheme that the CPU build refuses or runs without its activation scales."""
    if nvfp4_scheme.init_nvfp4_linear_kernel is nvfp4_kernel:
        return
    # vLLM forces Marlin for NVFP4A16 before it looks at its table: replace the scheme's own name for it.
    nvfp4_scheme.init_nvfp4_linear_kernel = nvfp4_kernel
    register_linear_kernel(EmulationMxFp4A16Linear, PlatformEnum.CPU, "mxfp4")
    register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    # First, because a later entry, chosen on AMX machines, ignores static input scales.
    linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].insert(0, EmulationStaticFp8Linear)
    linear._POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU].append(EmulationW8A16Fp8Linear)


def nvfp4_kernel(use_a16: bool = False) -> NvFp4LinearKernel:
    """What vLLM's `init_nvfp4_linear_kernel` answers, for the CPU."""
    kernel = EmulationNvFp4A16Linear if use_a16 else EmulationNvFp4Linear
    return kernel(NvFp4LinearLayerConfig())
