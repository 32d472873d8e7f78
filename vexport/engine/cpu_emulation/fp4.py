"""NVFP4 and MXFP4 linear layers, dequantized once at load. Imported only inside vLLM's processes."""

import torch
import torch.nn.functional as F
from torch.nn import Parameter
from vllm.model_executor.kernels.linear import (
    MxFp4LinearKernel,
    MxFp4LinearLayerConfig,
    NvFp4LinearKernel,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    break_fp4_bytes,
    dequantize_to_dtype,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kMxfp4Dynamic

from vexport.engine.cpu_emulation.layer import Answer, Dequantized, QuantizedLayer
from vexport.engine.cpu_emulation.rounding import fake_fp8, fake_mxfp4, fake_nvfp4
from vexport.numerics.constants import E8M0_BIAS, MX_GROUP


class EmulationNvFp4A16Linear(Dequantized, NvFp4LinearKernel):  # type: ignore[misc]
    """NVFP4 weights, activations as they are."""

    @classmethod
    def can_implement(cls, config: object) -> Answer:
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


class EmulationNvFp4Linear(EmulationNvFp4A16Linear):
    """NVFP4 weights and activations: vLLM's EmulationNvFp4LinearKernel, without its dequantization a call."""

    def apply_weights(
        self, layer: QuantizedLayer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.linear(fake_nvfp4(x, layer.input_global_scale_inv), layer.weight, bias)


class EmulationMxFp4Linear(Dequantized, MxFp4LinearKernel):  # type: ignore[misc]
    """MXFP4 weights; activations in MXFP4, as on SM 100, as they are, as in Marlin below, or in FP8."""

    @classmethod
    def can_implement(cls, config: MxFp4LinearLayerConfig) -> Answer:
        known = cls._supports_quant_scheme(None, config.activation_quant_key)
        return known, None if known else "requires MXFP4, dynamic FP8 or unquantized activations"

    @classmethod
    def _supports_quant_scheme(cls, weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        """Asked by vLLM 0.33 too, where the default refuses FP8 and an engine argument may have others."""
        if activation_key in (None, kMxfp4Dynamic):
            return True
        return activation_key.dtype == torch.float8_e4m3fn and not activation_key.scale.static

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        """Dequantize; the scales are e8m0 exponents with a bias of 127, one for 32 values."""
        values = break_fp4_bytes(layer.weight.data, torch.float32)
        scale = torch.exp2(layer.weight_scale.data.to(torch.float32) - E8M0_BIAS)
        weight = (values * scale.repeat_interleave(MX_GROUP, dim=-1)).to(torch.get_default_dtype())
        layer.weight = Parameter(weight, requires_grad=False)

    def apply_weights(
        self, layer: QuantizedLayer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        key = self.config.activation_quant_key
        if key is not None:
            x = fake_mxfp4(x) if key == kMxfp4Dynamic else fake_fp8(x, key.scale.group_shape.col)
        return F.linear(x, layer.weight, bias)
