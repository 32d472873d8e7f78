"""Puts the emulation kernels into vLLM's tables. Imported only inside vLLM's processes."""

import torch
from compressed_tensors.quantization import QuantizationArgs
from vllm import _custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import (
    EmulationMxfp8LinearKernel,
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
    register_linear_kernel,
)
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
    CompressedTensorsW4A4Mxfp4,
    CompressedTensorsW4A8Fp8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4 as nvfp4_scheme,
)
from vllm.model_executor.layers.quantization.compressed_tensors.transform.module import HadamardTransform
from vllm.model_executor.layers.quantization.quark.schemes import quark_nvfp4
from vllm.platforms import PlatformEnum

from vexport.engine.cpu_emulation.kernels import (
    EmulationFp8BlockLinear,
    EmulationFp8Linear,
    EmulationMxFp4Linear,
    EmulationNvFp4A16Linear,
    EmulationNvFp4Linear,
    EmulationW4A8Fp8Linear,
    EmulationW8A16Fp8Linear,
    EmulationWNA16Linear,
)
from vexport.engine.cpu_emulation.rounding import round_fp8

# Entries of one size and either sign, which vLLM's kernel computes without the matrix, so exactly.
_COMPUTED = "hadamard"
_ORIGINAL_QUANT = _custom_ops.scaled_fp8_quant
_ORIGINAL_SCHEME = CompressedTensorsConfig._get_scheme_from_parts


def register_kernels() -> None:
    """Offer a kernel for every scheme that the CPU build refuses or runs without its activation scales."""
    if nvfp4_scheme.init_nvfp4_linear_kernel is nvfp4_kernel:
        return
    # vLLM forces Marlin for NVFP4A16 before it looks at its table: replace each user's own name.
    for module in (nvfp4_scheme, modelopt, quark_nvfp4):
        module.init_nvfp4_linear_kernel = nvfp4_kernel
    register_linear_kernel(EmulationMxFp4Linear, PlatformEnum.CPU, "mxfp4")
    register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    # First, because a later entry, chosen on AMX machines, ignores static input scales, and another is slow.
    linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].insert(0, EmulationFp8Linear)
    # The CPU build lacks the operator behind this name, which fused layers need to share one weight scale.
    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    linear._POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU].append(EmulationW8A16Fp8Linear)
    # Last: vLLM's own kernels need AMX.
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].append(EmulationFp8BlockLinear)
    # Last, for what vLLM's own kernel for INT4 does not take; first on processors without AVX-512, for which
    # vLLM chooses that kernel although the build has none.
    mixed = linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
    mixed.insert(len(mixed) if hasattr(torch.ops._C, "cpu_gemm_wna16") else 0, EmulationWNA16Linear)
    # First, because vLLM's kernel for INT4 with INT8 inputs does not look at the inputs' type.
    mixed.insert(0, EmulationW4A8Fp8Linear)
    CompressedTensorsConfig._get_scheme_from_parts = scheme_from_parts
    HadamardTransform.forward = rotate


def scheme_from_parts(
    config: CompressedTensorsConfig,
    weight_quant: QuantizationArgs,
    input_quant: QuantizationArgs | None,
    output_quant: QuantizationArgs | None = None,
    format: str | None = None,
    layer_name: str | None = None,
) -> CompressedTensorsScheme:
    """vLLM's choice of a scheme, with two that only a GPU gets: W4AFP8, and MXFP4 without MXFP4 inputs."""
    if config._is_fp8_w4a8(weight_quant, input_quant):
        return CompressedTensorsW4A8Fp8(
            num_bits=weight_quant.num_bits,
            strategy=weight_quant.strategy,
            symmetric=weight_quant.symmetric,
            group_size=weight_quant.group_size,
        )
    if config._is_mxfp4(weight_quant) and input_quant is None:
        return CompressedTensorsW4A4Mxfp4(activation_quant_key=None)
    return _ORIGINAL_SCHEME(config, weight_quant, input_quant, output_quant, format, layer_name)


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
    """Replace vLLM's `init_nvfp4_linear_kernel`: return the CPU kernel."""
    kernel = EmulationNvFp4A16Linear if use_a16 else EmulationNvFp4Linear
    return kernel(NvFp4LinearLayerConfig())


def rotate(transform: HadamardTransform, value: torch.Tensor, part_id: int = 0) -> torch.Tensor:
    """Replace `HadamardTransform.forward`: `value` (..., features) times the matrix or its inverse.

    vLLM has kernels for it on GPUs only.
    """
    if part_id not in transform.weight.partitions:
        return value
    chosen = transform.transforms[part_id]
    matrix = transform.weight.partitions[part_id].to(torch.float32)
    size = matrix.shape[0]
    if chosen.scheme.type == _COMPUTED:
        matrix = matrix.sign() / size**0.5
    blocks = value.to(torch.float32).reshape(-1, size)
    turned: torch.Tensor = blocks @ (matrix.T if chosen.args.inverse else matrix)
    return turned.reshape(value.shape).to(value.dtype)
