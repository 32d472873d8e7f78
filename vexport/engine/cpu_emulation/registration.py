"""Puts the emulation kernels into vLLM's tables. Imported only inside vLLM's processes."""

import torch
from vllm import _custom_ops
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
    EmulationFp8Linear,
    EmulationMxFp4A16Linear,
    EmulationNvFp4A16Linear,
    EmulationNvFp4Linear,
    EmulationW8A16Fp8Linear,
)
from vexport.engine.cpu_emulation.rounding import round_fp8

_ORIGINAL_QUANT = _custom_ops.scaled_fp8_quant


def register_kernels() -> None:
    """Offer a kernel for every scheme that the CPU build refuses or runs without its activation scales."""
    if nvfp4_scheme.init_nvfp4_linear_kernel is nvfp4_kernel:
        return
    # vLLM forces Marlin for NVFP4A16 before it looks at its table: replace the scheme's own name for it.
    nvfp4_scheme.init_nvfp4_linear_kernel = nvfp4_kernel
    register_linear_kernel(EmulationMxFp4A16Linear, PlatformEnum.CPU, "mxfp4")
    register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    # First, because a later entry, chosen on AMX machines, ignores static input scales, and another is slow.
    linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].insert(0, EmulationFp8Linear)
    # The CPU build lacks the operator behind this name, which fused layers need to share one weight scale.
    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    linear._POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU].append(EmulationW8A16Fp8Linear)


def scaled_fp8_quant(
    tensor: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's `ops.scaled_fp8_quant`: e4m3 values and their scale; here in torch for a static one a tensor."""
    if scale is None:
        quantized: tuple[torch.Tensor, torch.Tensor] = _ORIGINAL_QUANT(tensor)
        return quantized
    return round_fp8(tensor, scale).to(torch.float8_e4m3fn), scale


def ready_amx() -> None:
    """Ask Linux for the AMX tiles in this process.

    vLLM's attention uses them without asking, and is killed by SIGILL unless oneDNN happened to ask before:
    a model whose layers are all unquantized or emulated dies at its first short prompt.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def nvfp4_kernel(use_a16: bool = False) -> NvFp4LinearKernel:
    """What vLLM's `init_nvfp4_linear_kernel` answers, for the CPU."""
    kernel = EmulationNvFp4A16Linear if use_a16 else EmulationNvFp4Linear
    return kernel(NvFp4LinearLayerConfig())
