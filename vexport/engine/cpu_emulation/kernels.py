"""Linear kernels that dequantize once at load and round activations as the scheme says.

Each replaces the weight by its dequantized values, so that a forward pass is one `F.linear`. Imported only
inside vLLM's processes. The base classes and the names of a layer's parameters are vLLM 0.32's
(model_executor/kernels/linear).
"""

import torch
import torch.nn.functional as F
from torch.nn import Module, Parameter
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    MxFp4LinearKernel,
    MxFp4LinearLayerConfig,
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    break_fp4_bytes,
    dequantize_to_dtype,
)

from vexport.engine.cpu_emulation.rounding import fake_nvfp4, fp8_token_scale, round_fp8

Answer = tuple[bool, str | None]


class QuantizedLayer(Module):
    """What the kernels here read and replace on a linear layer of vLLM."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_global_scale: torch.Tensor
    input_scale: torch.Tensor | None
    input_global_scale_inv: torch.Tensor


class EmulationNvFp4A16Linear(NvFp4LinearKernel):  # type: ignore[misc]
    """NVFP4 weights, activations as they are."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return True, None

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> Answer:
        return True, None

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        """Dequantize; `weight_global_scale` is a factor by now, vLLM has inverted the stored divisor."""
        weight = dequantize_to_dtype(
            layer.weight.data,
            layer.weight_scale.data,
            layer.weight_global_scale,
            torch.get_default_dtype(),
            swizzle=False,
        )
        layer.weight = Parameter(weight, requires_grad=False)

    def apply_weights(
        self, layer: QuantizedLayer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)


class EmulationNvFp4Linear(EmulationNvFp4A16Linear):
    """NVFP4 weights and activations: vLLM's EmulationNvFp4LinearKernel, without its dequantization a call."""

    def apply_weights(
        self, layer: QuantizedLayer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.linear(fake_nvfp4(x, layer.input_global_scale_inv), layer.weight, bias)


class EmulationFp8Linear(FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 weights (a scale per tensor or channel) and activations (static per tensor, dynamic per token).

    The CPU build ignores static activation scales where it has AMX, and takes 0.2 s a layer for dynamic ones
    where it has no AMX-FP8.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return True, None

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> Answer:
        activation, weight = c.activation_quant_key.scale, c.weight_quant_key.scale.group_shape
        static = activation.static and activation.group_shape.is_per_tensor()
        dynamic = not activation.static and activation.group_shape.is_per_token()
        if not (static or dynamic):
            return False, "requires activation scales static per tensor or dynamic per token"
        return (
            weight.is_per_tensor() or weight.is_per_channel(),
            "requires weight scales per tensor or channel",
        )

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        """The weight's e4m3 values in the model's dtype, which holds them exactly, as (out, in)."""
        weight = layer.weight.data.t().to(self.config.out_dtype)
        layer.weight = Parameter(weight.contiguous(), requires_grad=False)
        layer.weight_scale = Parameter(layer.weight_scale.data.reshape(-1), requires_grad=False)

    def apply_weights(
        self, layer: QuantizedLayer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        scale = fp8_token_scale(x) if layer.input_scale is None else layer.input_scale
        product = F.linear(round_fp8(x, scale), layer.weight).to(torch.float32)
        output = product * (scale * layer.weight_scale)
        return (output if bias is None else output + bias).to(x.dtype)

    def apply_scaled_mm(self, **tensors: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("apply_weights does it all")


class EmulationW8A16Fp8Linear(FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 weights with a scale per channel, activations as they are."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return True, None

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> Answer:
        return c.weight_quant_key.scale.group_shape.is_per_channel(), "requires a weight scale per channel"

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        weight = layer.weight.data.t().to(torch.float32) * layer.weight_scale.data.reshape(-1, 1)
        layer.weight = Parameter(weight.to(self.config.out_dtype).contiguous(), requires_grad=False)

    def apply_weights(
        self, layer: QuantizedLayer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)

    def apply_scaled_mm(self, **tensors: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("apply_weights does it all")


class EmulationMxFp4A16Linear(MxFp4LinearKernel):  # type: ignore[misc]
    """MXFP4 weights, activations as they are: what vLLM's Marlin kernel does below SM 100."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return True, None

    @classmethod
    def can_implement(cls, config: MxFp4LinearLayerConfig) -> Answer:
        return True, None

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        """Dequantize; the scales are e8m0 exponents with a bias of 127, one for 32 values."""
        values = break_fp4_bytes(layer.weight.data, torch.float32)
        scale = torch.exp2(layer.weight_scale.data.to(torch.float32) - 127)
        weight = (values * scale.repeat_interleave(32, dim=-1)).to(torch.get_default_dtype())
        layer.weight = Parameter(weight, requires_grad=False)

    def apply_weights(
        self, layer: QuantizedLayer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)
