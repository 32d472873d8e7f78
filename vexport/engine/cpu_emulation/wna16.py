"""Linear layers with packed integer weights, dequantized once at load. Only for vLLM's processes."""

import torch
import torch.nn.functional as F
from torch.nn import Parameter
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig

from vexport.engine.cpu_emulation.layer import Answer, Dequantized, QuantizedLayer
from vexport.engine.cpu_emulation.rounding import fp8_token_scale, round_fp8


def unpack(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """(rows, columns) int64 from int32 words (rows, ceil(columns*bits/32)), values across words too.

    Value i has the bits from i*bits on, low bits first: `packed_factor` in compressed_tensors_wNa16.py.
    """
    words = F.pad(packed.to(torch.int64) & 0xFFFFFFFF, (0, 1))
    first = torch.arange(columns) * bits
    word, offset = first // 32, first % 32
    return ((words[:, word] | (words[:, word + 1] << 32)) >> offset) & ((1 << bits) - 1)


class EmulationWNA16Linear(Dequantized, MPLinearKernel):  # type: ignore[misc]
    """Weights of 2 to 8 bits in groups or channels, with or without zero points; activations as they are."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> Answer:
        known = c.act_type in (torch.bfloat16, torch.float16)
        return known, None if known else "requires 16-bit activations"

    def process_weights_after_loading(self, layer: QuantizedLayer) -> None:
        packed, scale, zero_point = self._get_weight_params(layer)
        columns, rows = self.config.partition_weight_shape
        bits = self.config.weight_type.size_bits
        values = unpack(packed.data, bits, columns).reshape(rows, scale.shape[1], -1)
        zeros = torch.tensor(1 << (bits - 1))
        if self.config.zero_points:
            zeros = unpack(zero_point.data.T, bits, rows).T.unsqueeze(-1)
        steps = self.stored_scale(scale.data.to(torch.float32)).unsqueeze(-1)
        weight = (values - zeros).to(torch.float32) * steps
        layer.weight = Parameter(weight.reshape(rows, columns).to(scale.dtype), requires_grad=False)
        setattr(layer, self.w_q_name, None)

    def stored_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """The scales (rows, groups), float32, as the kernel uses them."""
        return scale


class EmulationW4A8Fp8Linear(EmulationWNA16Linear):
    """INT4 weights in groups, FP8 activations with a scale per token: vLLM's CutlassW4A8LinearKernel."""

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> Answer:
        known = c.act_type == torch.float8_e4m3fn
        return known, None if known else "requires FP8 activations"

    def stored_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Group scales in e4m3 relative to one of the row, an eighth of what would fill their range.

        `convert_bf16_scales_to_fp8` (layers/quantization/utils/quant_utils.py).
        """
        row = fp8_token_scale(scale)
        eighth = (round_fp8(scale, row) / 8).to(torch.float8_e4m3fn).to(torch.float32)
        return eighth * 8 * row

    def apply_weights(
        self, layer: QuantizedLayer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        scale = fp8_token_scale(x)
        product = F.linear(round_fp8(x, scale), layer.weight).to(torch.float32) * scale
        return (product if bias is None else product + bias).to(x.dtype)
