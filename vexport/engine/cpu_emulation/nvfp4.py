"""NVFP4 linear layers, dequantized once at load. Imported only inside vLLM's processes."""

import torch
import torch.nn.functional as F
from torch.nn import Parameter
from vllm.model_executor.kernels.linear import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

from vexport.engine.cpu_emulation.layer import Answer, QuantizedLayer
from vexport.engine.cpu_emulation.rounding import fake_nvfp4


class EmulationNvFp4A16Linear(NvFp4LinearKernel):  # type: ignore[misc]
    """NVFP4 weights, activations as they are."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return True, None

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> Answer:
        return True, None

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        """Dequantize; `weight_global_scale` is a factor by now, vLLM has inverted the stored global scale."""
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
