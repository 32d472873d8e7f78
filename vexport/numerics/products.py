"""Compute products of matrices with the fastest units of a CPU or a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from vexport.numerics.bf16_products import add_bf16_product, compiles_bf16_products

# Number of rows of sums per block. Without the blocks above the diagonal, nearly half of the
# operations are saved.
BLOCK_ROWS = 128


@contextmanager
def exact_products(dtype: torch.dtype) -> Iterator[None]:
    """Use faster units for float32 products of 16-bit values inside the block.

    These units are the bf16 units of a CPU or the TF32 units of a GPU.

    The product of two 16-bit values is exact in float32, and sums are computed in float32. Only the
    order of the sum differs, which changes the result by about 1e-6.
    """
    cpu: SimpleNamespace = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # in no stub
    gpu = torch.backends.cuda.matmul
    before = cpu.fp32_precision, gpu.fp32_precision
    cpu.fp32_precision = "bf16" if dtype == torch.bfloat16 else before[0]
    gpu.fp32_precision = "tf32" if dtype in (torch.bfloat16, torch.float16) else before[1]
    try:
        yield
    finally:
        cpu.fp32_precision, gpu.fp32_precision = before


def product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the product of two float32 matrices, computed in float32.

    On a CPU oneDNN computes it. On an AMD CPU this takes half of the time of MKL, which torch uses
    by default.
    """
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if first.device.type != "cpu" or not has_onednn:
        return first @ second
    made: torch.Tensor = torch.nn.functional.linear(first.to_mkldnn(), second.T.to_mkldnn())
    return made.to_dense()


def add_product(
    sums: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    alpha: float = 1.0,
    lower: bool = False,
) -> None:
    """Add `alpha` first^T second to `sums` in place. Sums are computed in float32.

    `first` is (tokens, rows), `second` (tokens, columns), and `sums` (rows, columns) float32. With
    `lower`, values above the diagonal may not be added.
    """
    if len(first) != len(second) or sums.shape != (first.shape[1], second.shape[1]):
        raise ValueError(f"got {first.shape}, {second.shape} and {sums.shape}")
    is_bf16 = first.dtype == second.dtype == torch.bfloat16
    has_sums = sums.dtype == torch.float32 and sums.is_contiguous()
    if is_bf16 and has_sums and first.device.type == "cpu" and compiles_bf16_products():
        add_bf16_product(sums, first, second, alpha=alpha, lower=lower)
        return
    with exact_products(first.dtype):
        left, right = first.to(torch.float32).T, second.to(torch.float32)
        step = BLOCK_ROWS if lower else len(sums)
        for start in range(0, len(sums), step):
            rows = slice(start, start + step)
            last = rows.stop if lower else sums.shape[1]
            sums[rows, :last].addmm_(left[rows], right[:, :last], alpha=alpha)
