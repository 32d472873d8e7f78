"""Compute products of matrices with the fastest units of a CPU or a GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from vexport.numerics.bf16_products import add_bf16_product
from vexport.numerics.cpu import bf16_units

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
    is_bf16 = first.dtype == second.dtype == torch.bfloat16
    if is_bf16 and first.device.type == "cpu" and _has_kernel():
        add_bf16_product(sums, first, second, alpha=alpha, lower=lower)
        return
    with exact_products(first.dtype):
        left, right = first.to(torch.float32).T, second.to(torch.float32)
        step = BLOCK_ROWS if lower else len(sums)
        for start in range(0, len(sums), step):
            rows = slice(start, start + step)
            last = rows.stop if lower else sums.shape[1]
            sums[rows, :last].addmm_(left[rows], right[:, :last], alpha=alpha)


def _has_kernel() -> bool:
    """Return True if numba compiles for this CPU, and the CPU has the kernel's instructions."""
    other_cpu = {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"} & os.environ.keys()
    return bf16_units() == "avx512" and not other_cpu
