"""What the emulation kernels read and replace. Imported only inside vLLM's processes."""

import torch
import torch.nn.functional as F
from torch.nn import Module

# (whether a kernel can run a layer, why not)
Answer = tuple[bool, str | None]


class QuantizedLayer(Module):
    """What the kernels here read and replace on a linear layer of vLLM."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_scale_inv: torch.Tensor
    weight_block_size: tuple[int, int] | None
    weight_global_scale: torch.Tensor
    input_scale: torch.Tensor | None
    input_global_scale_inv: torch.Tensor


class Dequantized:
    """Before a kernel class of vLLM's: runs anywhere, and multiplies by a weight in floats."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Yes."""
        return True, None

    def apply_weights(
        self, layer: QuantizedLayer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` (..., in) times the weight (out, in)."""
        return F.linear(x, layer.weight, bias)

    def apply_scaled_mm(self, **tensors: torch.Tensor) -> torch.Tensor:
        """Never called, where `apply_weights` does it all; vLLM wants it to be there."""
        raise NotImplementedError

    apply_block_scaled_mm = apply_scaled_mm
