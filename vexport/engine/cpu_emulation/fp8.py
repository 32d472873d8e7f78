"""FP8 linear layers, widened once at load. Imported only inside vLLM's processes."""

import torch
import torch.nn.functional as F
from torch.nn import Parameter
from vllm.model_executor.kernels.linear import (
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
)

from vexport.engine.cpu_emulation.layer import Answer, Dequantized, QuantizedLayer
from vexport.engine.cpu_emulation.rounding import fake_fp8, fp8_token_scale, round_fp8


class EmulationFp8Linear(Dequantized, FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 weights (a scale per tensor or channel) and activations (static per tensor, dynamic per token).

    The CPU build ignores static activation scales where it has AMX, and takes 0.2 s a layer for dynamic ones
    where it has no AMX-FP8.
    """

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


class EmulationW8A16Fp8Linear(Dequantized, FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 weights, activations as they are. vLLM makes scales per channel of those per tensor."""

    @classmethod
    def can_implement(cls, config: object) -> Answer:
        return True, None

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        """With scales per channel the weight comes as (in, out), with scales by block as it is stored."""
        if layer.weight_block_size is None:
            weight = layer.weight.data.t().to(torch.float32) * layer.weight_scale.data.reshape(-1, 1)
        else:
            weight = layer.weight.data.to(torch.float32) * blocks_of(layer, layer.weight_scale_inv.data)
        layer.weight = Parameter(weight.to(self.config.out_dtype).contiguous(), requires_grad=False)


class EmulationFp8BlockLinear(Dequantized, Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 weights with scales by block, activations dynamic in groups: for CPUs without AMX."""

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        """Dequantize the weight, which is stored as (out, in)."""
        weight = layer.weight.data.to(torch.float32) * blocks_of(
            layer, self._get_layer_params(layer).block_scale.data
        )
        layer.weight = Parameter(weight.to(self.config.out_dtype).contiguous(), requires_grad=False)

    def apply_weights(
        self, layer: QuantizedLayer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        group = self.config.activation_quant_key.scale.group_shape.col
        rounded = fake_fp8(x.reshape(-1, x.shape[-1]), group)
        return F.linear(rounded.reshape(x.shape), layer.weight, bias)


def blocks_of(layer: QuantizedLayer, stored: torch.Tensor) -> torch.Tensor:
    """The scales by block of a weight (out, in), each as often as its block has elements."""
    assert layer.weight_block_size is not None
    (high, wide), (rows, columns) = layer.weight_block_size, layer.weight.shape
    scales = stored.repeat_interleave(high, 0)[:rows]
    return scales.repeat_interleave(wide, 1)[:, :columns]
