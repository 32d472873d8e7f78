"""Linear layers that are dequantized once at load, and their registration in vLLM's tables.

Imported only inside vLLM's processes.
"""

import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from torch.nn import Module, Parameter
from vllm import _custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors import schemes
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4 as nvfp4_scheme,
)
from vllm.model_executor.layers.quantization.compressed_tensors.transform.module import (
    HadamardTransform,
)
from vllm.model_executor.layers.quantization.quark.schemes import quark_nvfp4
from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kMxfp4Dynamic
from vllm.platforms import PlatformEnum

from vexport.engine.cpu_emulation.rounding import (
    fake_fp8,
    fake_mxfp4,
    fake_nvfp4,
    fp8_token_scale,
    round_fp8,
)
from vexport.formats.dequantize import unpack_int32
from vexport.numerics import E8M0_BIAS, MX_GROUP

# Result of a kernel's check: whether the kernel can run a layer, and the kernel's requirement. vLLM
# reads the requirement only if the kernel cannot run the layer.
KernelSupport = tuple[bool, str | None]
# Type of a transform with a Hadamard matrix. All entries of this matrix have the same magnitude and
# differ only in sign. vLLM's kernel computes the transform exactly, without the stored matrix.
_HADAMARD = "hadamard"
_ORIGINAL_QUANT = _custom_ops.scaled_fp8_quant
_ORIGINAL_SCHEME = CompressedTensorsConfig._get_scheme_from_parts


class QuantizedLayer(Module):
    """A linear layer of vLLM, with the tensors that the kernels in this module read and replace."""

    weight: Tensor
    weight_scale: Tensor
    weight_scale_inv: Tensor
    weight_block_size: tuple[int, int] | None
    weight_global_scale: Tensor
    input_scale: Tensor | None
    input_global_scale_inv: Tensor


class Dequantized:
    """Mixin for a kernel class of vLLM that multiplies by a dequantized weight.

    It runs on any device.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> KernelSupport:
        """Return True: every device can run the kernel."""
        return True, None

    @classmethod
    def can_implement(cls, config: object) -> KernelSupport:
        """Return True, unless a kernel overrides this."""
        return True, None

    def apply_weights(self, layer: QuantizedLayer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply `x` (..., in) by the weight (out, in)."""
        return F.linear(x, layer.weight, bias)

    def apply_scaled_mm(self, **tensors: Tensor) -> Tensor:
        """Raise NotImplementedError.

        vLLM requires this method but never calls it: `apply_weights` does all the work.
        """
        raise NotImplementedError

    apply_block_scaled_mm = apply_scaled_mm


class EmulationWNA16Linear(Dequantized, linear.MPLinearKernel):  # type: ignore[misc]
    """Weights of 2 to 8 bits in groups or channels, with or without zero points.

    Activations are not quantized.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: linear.MPLinearLayerConfig) -> KernelSupport:
        return c.act_type in (torch.bfloat16, torch.float16), "requires 16-bit activations"

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        """Dequantize the weight.

        Its first dimension is the outputs in compressed-tensors, and the inputs in GPTQ and AWQ.
        """
        packed, scale, zero_point = self._get_weight_params(layer)
        columns, rows = self.config.partition_weight_shape
        bits = self.config.weight_type.size_bits
        values = unpack_int32(
            packed.data if packed.input_dim else packed.data.T.contiguous(), bits, columns
        )
        scales = self.stored_scale(
            (scale.data.T if scale.output_dim else scale.data).to(torch.float32)
        )
        size = columns // scales.shape[1]
        zeros = torch.tensor(1 << (bits - 1))
        if self.config.zero_points:
            by_group = zero_point.data if zero_point.output_dim else zero_point.data.T.contiguous()
            zeros = unpack_int32(by_group, bits, rows).T.unsqueeze(-1)
        weight = (values.reshape(rows, -1, size) - zeros).to(torch.float32) * scales.unsqueeze(-1)
        # Remove the packed weight before `weight` is set, because Quark names both `weight`.
        setattr(layer, self.w_q_name, None)
        layer.weight = Parameter(weight.reshape(rows, columns).to(scale.dtype), requires_grad=False)

    def stored_scale(self, scale: Tensor) -> Tensor:
        """Return the scales (rows, groups), float32, with the rounding of the kernel."""
        return scale


class EmulationW4A8Fp8Linear(EmulationWNA16Linear):
    """INT4 weights in groups, FP8 activations with a scale per token.

    It replaces vLLM's CutlassW4A8LinearKernel.
    """

    @classmethod
    def can_implement(cls, c: linear.MPLinearLayerConfig) -> KernelSupport:
        return c.act_type == torch.float8_e4m3fn, "requires FP8 activations"

    def stored_scale(self, scale: Tensor) -> Tensor:
        """Return the group scales, rounded to e4m3 relative to a scale of the row.

        Like vLLM, divide the e4m3 values by 8 and multiply the row's scale by 8. Source:
        `convert_bf16_scales_to_fp8` (layers/quantization/utils/quant_utils.py).
        """
        row = fp8_token_scale(scale)
        eighth = (round_fp8(scale, row) / 8).to(torch.float8_e4m3fn).to(torch.float32)
        return eighth * 8 * row

    def apply_weights(self, layer: QuantizedLayer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        scale = fp8_token_scale(x)
        product = F.linear(round_fp8(x, scale), layer.weight).to(torch.float32) * scale
        return (product if bias is None else product + bias).to(x.dtype)


class EmulationFp8Linear(Dequantized, linear.FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 weights and activations.

    Weights have a scale per tensor or channel. Activations have a static scale per tensor or a
    dynamic scale per token.

    On machines with AMX, the CPU build ignores static activation scales. On machines without
    AMX-FP8, its kernel for dynamic scales takes 0.2 s per layer.
    """

    @classmethod
    def can_implement(cls, c: linear.FP8ScaledMMLinearLayerConfig) -> KernelSupport:
        activation, weight = c.activation_quant_key.scale, c.weight_quant_key.scale.group_shape
        shape = activation.group_shape
        if not (shape.is_per_tensor() if activation.static else shape.is_per_token()):
            return False, "requires activation scales static per tensor or dynamic per token"
        known = weight.is_per_tensor() or weight.is_per_channel()
        return known, "requires weight scales per tensor or channel"

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        """Convert the weight's e4m3 values to the model's dtype, as (out, in).

        The model's dtype holds them exactly.
        """
        weight = layer.weight.data.t().to(self.config.out_dtype)
        layer.weight = Parameter(weight.contiguous(), requires_grad=False)
        layer.weight_scale = Parameter(layer.weight_scale.data.reshape(-1), requires_grad=False)

    def apply_weights(self, layer: QuantizedLayer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        scale = fp8_token_scale(x) if layer.input_scale is None else layer.input_scale
        product = F.linear(round_fp8(x, scale), layer.weight).to(torch.float32)
        output = product * (scale * layer.weight_scale)
        return (output if bias is None else output + bias).to(x.dtype)


class EmulationW8A16Fp8Linear(Dequantized, linear.FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 weights, activations that are not quantized.

    vLLM expands scales per tensor to scales per channel.
    """

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        """Dequantize the weight.

        With scales per channel, the weight is (in, out). With block scales, it is (out, in),
        as stored.
        """
        if layer.weight_block_size is None:
            weight = layer.weight.data.t().to(torch.float32) * layer.weight_scale.data.reshape(
                -1, 1
            )
        else:
            weight = layer.weight.data.to(torch.float32) * blocks_of(
                layer, layer.weight_scale_inv.data
            )
        layer.weight = Parameter(weight.to(self.config.out_dtype).contiguous(), requires_grad=False)


class EmulationFp8BlockLinear(Dequantized, linear.Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 weights with scales per block, dynamic activation scales per group.

    It is for CPUs without AMX.
    """

    can_implement = linear.Fp8BlockScaledMMLinearKernel.can_implement

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        """Dequantize the weight, which is stored as (out, in)."""
        scales = blocks_of(layer, self._get_layer_params(layer).block_scale.data)
        weight = layer.weight.data.to(torch.float32) * scales
        layer.weight = Parameter(weight.to(self.config.out_dtype).contiguous(), requires_grad=False)

    def apply_weights(self, layer: QuantizedLayer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        group = self.config.activation_quant_key.scale.group_shape.col
        rounded = fake_fp8(x.reshape(-1, x.shape[-1]), group)
        return F.linear(rounded.reshape(x.shape), layer.weight, bias)


class EmulationNvFp4A16Linear(Dequantized, linear.NvFp4LinearKernel):  # type: ignore[misc]
    """NVFP4 weights, activations that are not quantized."""

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        """Dequantize the weight.

        vLLM has already inverted the stored global scale, so `weight_global_scale` is a factor.
        """
        weight = nvfp4_emulation_utils.dequantize_to_dtype(
            layer.weight.data,
            layer.weight_scale.data,
            layer.weight_global_scale,
            torch.get_default_dtype(),
            swizzle=False,
        )
        layer.weight = Parameter(weight, requires_grad=False)


class EmulationNvFp4Linear(EmulationNvFp4A16Linear):
    """NVFP4 weights and activations, as in vLLM's EmulationNvFp4LinearKernel.

    That kernel dequantizes the weight at each call. This kernel does it once.
    """

    def apply_weights(self, layer: QuantizedLayer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(fake_nvfp4(x, layer.input_global_scale_inv), layer.weight, bias)


class EmulationMxFp4Linear(Dequantized, linear.MxFp4LinearKernel):  # type: ignore[misc]
    """MXFP4 weights.

    Activations are MXFP4 as on SM 100, unquantized as in Marlin on older GPUs, or FP8.
    """

    @classmethod
    def can_implement(cls, config: linear.MxFp4LinearLayerConfig) -> KernelSupport:
        known = cls._supports_quant_scheme(None, config.activation_quant_key)
        return known, "requires MXFP4, dynamic FP8 or unquantized activations"

    @classmethod
    def _supports_quant_scheme(
        cls, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        """Return True for unquantized, MXFP4 and dynamic FP8 inputs.

        vLLM 0.33 calls this function as well, and its default refuses FP8.
        """
        if activation_key in (None, kMxfp4Dynamic):
            return True
        return activation_key.dtype == torch.float8_e4m3fn and not activation_key.scale.static

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        """Dequantize the weight.

        The scales are e8m0 exponents with a bias of 127, one exponent for each group of 32 values.
        """
        values = nvfp4_emulation_utils.break_fp4_bytes(layer.weight.data, torch.float32)
        scale = torch.exp2(layer.weight_scale.data.to(torch.float32) - E8M0_BIAS)
        weight = (values * scale.repeat_interleave(MX_GROUP, dim=-1)).to(torch.get_default_dtype())
        layer.weight = Parameter(weight, requires_grad=False)

    def apply_weights(self, layer: QuantizedLayer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        key = self.config.activation_quant_key
        if key is not None:
            x = fake_mxfp4(x) if key == kMxfp4Dynamic else fake_fp8(x, key.scale.group_shape.col)
        return F.linear(x, layer.weight, bias)


def blocks_of(layer: QuantizedLayer, stored: Tensor) -> Tensor:
    """Return the block scales of a weight (out, in), repeated for each element of their blocks."""
    assert layer.weight_block_size is not None
    (block_rows, block_cols), (rows, columns) = layer.weight_block_size, layer.weight.shape
    scales = stored.repeat_interleave(block_rows, 0)[:rows]
    return scales.repeat_interleave(block_cols, 1)[:, :columns]


def register_kernels() -> None:
    """Register the kernels of this module in vLLM.

    The kernels cover every scheme that the CPU build refuses, or for which it ignores the
    activation scales.
    """
    if nvfp4_scheme.init_nvfp4_linear_kernel is nvfp4_kernel:
        return
    # vLLM forces Marlin for NVFP4A16 before it looks at its table. So the function is replaced in
    # each module that imports it.
    for module in (nvfp4_scheme, modelopt, quark_nvfp4):
        module.init_nvfp4_linear_kernel = nvfp4_kernel
    linear.register_linear_kernel(EmulationMxFp4Linear, PlatformEnum.CPU, "mxfp4")
    linear.register_linear_kernel(linear.EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    # This kernel is first in the list. Of the later entries, the kernel for AMX machines ignores
    # static input scales, and another kernel is slow.
    linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].insert(0, EmulationFp8Linear)
    # The CPU build lacks the operator of this function. Fused layers need it to share one
    # weight scale.
    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    linear._POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU].append(EmulationW8A16Fp8Linear)
    # The emulation is last, so that vLLM's kernels run if the machine has AMX.
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].append(EmulationFp8BlockLinear)
    # The emulation is last in the list, for layers that vLLM's INT4 kernel refuses. On processors
    # without AVX-512 it is first, because vLLM chooses its INT4 kernel there although the build
    # does not contain that kernel.
    mixed = linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
    mixed.insert(len(mixed) if hasattr(torch.ops._C, "cpu_gemm_wna16") else 0, EmulationWNA16Linear)
    # First, because vLLM's kernel for INT4 with INT8 inputs does not check the inputs' type.
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
) -> schemes.CompressedTensorsScheme:
    """Return the scheme that vLLM chooses, also for two cases that vLLM supports only on a GPU.

    The two cases are W4AFP8, and MXFP4 weights without MXFP4 inputs.
    """
    if config._is_fp8_w4a8(weight_quant, input_quant):
        return schemes.CompressedTensorsW4A8Fp8(
            num_bits=weight_quant.num_bits,
            strategy=weight_quant.strategy,
            symmetric=weight_quant.symmetric,
            group_size=weight_quant.group_size,
        )
    if config._is_mxfp4(weight_quant) and input_quant is None:
        return schemes.CompressedTensorsW4A4Mxfp4(activation_quant_key=None)
    return _ORIGINAL_SCHEME(config, weight_quant, input_quant, output_quant, format, layer_name)


def scaled_fp8_quant(tensor: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Replace vLLM's `ops.scaled_fp8_quant`: return e4m3 values and their scale.

    A given scale, which is static per tensor, is applied in torch.
    """
    if scale is None:
        quantized: tuple[Tensor, Tensor] = _ORIGINAL_QUANT(tensor)
        return quantized
    return round_fp8(tensor, scale).to(torch.float8_e4m3fn), scale


def enable_amx() -> None:
    """Request the AMX tiles for this process from Linux.

    vLLM's attention uses the tiles without requesting them. SIGILL then kills the process, unless
    oneDNN has already requested the tiles. Without this function, a model with only unquantized or
    emulated layers would die at its first short prompt.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def nvfp4_kernel(use_a16: bool = False) -> linear.NvFp4LinearKernel:
    """Replace vLLM's `init_nvfp4_linear_kernel`: return the CPU kernel."""
    kernel = EmulationNvFp4A16Linear if use_a16 else EmulationNvFp4Linear
    return kernel(linear.NvFp4LinearLayerConfig())


def rotate(transform: HadamardTransform, value: Tensor, part_id: int = 0) -> Tensor:
    """Replace `HadamardTransform.forward`: multiply a value by the matrix or its inverse.

    `value` is (..., features).

    vLLM has kernels for this on GPUs only.
    """
    if part_id not in transform.weight.partitions:
        return value
    chosen = transform.transforms[part_id]
    matrix = transform.weight.partitions[part_id].to(torch.float32)
    size = matrix.shape[0]
    if chosen.scheme.type == _HADAMARD:
        matrix = matrix.sign() / size**0.5
    blocks = value.to(torch.float32).reshape(-1, size)
    turned: Tensor = blocks @ (matrix.T if chosen.args.inverse else matrix)
    return turned.reshape(value.shape).to(value.dtype)
