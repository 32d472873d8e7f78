"""Online rotations, for which vLLM has kernels of GPUs only. Imported only inside vLLM's processes."""

import torch
from vllm.model_executor.layers.quantization.compressed_tensors.transform.module import HadamardTransform

# Entries of one size and either sign, which vLLM's kernel computes without the matrix, so exactly.
COMPUTED = "hadamard"


def rotate(transform: HadamardTransform, value: torch.Tensor, part_id: int = 0) -> torch.Tensor:
    """What `HadamardTransform.forward` answers: `value` (..., features) times the matrix, or its inverse."""
    if part_id not in transform.weight.partitions:
        return value
    chosen = transform.transforms[part_id]
    matrix = transform.weight.partitions[part_id].to(torch.float32)
    size = matrix.shape[0]
    if chosen.scheme.type == COMPUTED:
        matrix = matrix.sign() / size**0.5
    blocks = value.to(torch.float32).reshape(-1, size)
    turned: torch.Tensor = blocks @ (matrix.T if chosen.args.inverse else matrix)
    return turned.reshape(value.shape).to(value.dtype)
