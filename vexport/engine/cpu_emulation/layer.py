"""What the emulation kernels read and replace. Imported only inside vLLM's processes."""

import torch
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
