"""Moments of a layer's input: sums of products over tokens, which decide how weights are rounded.

GPTQ and refits need these sums. They are computed on the device of the tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from vexport.numerics.ranks import all_reduce

# Number of columns of H per block. Only the blocks up to the diagonal are computed, which saves
# half of the products.
BLOCK_COLUMNS = 128


@dataclass(slots=True, kw_only=True)
class Moments:
    """Sums over tokens, float32 (in, in): `hessian` X~^T V X~ and `drift` X~^T V (X - X~).

    X~ (tokens, in) is the input in the quantized stream after the layer's input rounding. X is the
    input of the source's layer for the same tokens. V is the weight of each token, 1 by default.
    `drift` is None if no refit needs it. `add` fills only the lower triangle of
    `hessian`, and `complete` makes the matrix symmetric.
    """

    hessian: torch.Tensor
    drift: torch.Tensor | None
    tokens: int = 0

    @classmethod
    def zeros(cls, columns: int, *, drift: bool, device: str | torch.device = "cpu") -> "Moments":
        """Return the moments of no tokens."""
        zero = torch.zeros(columns, columns, device=device)
        return cls(hessian=zero, drift=zero.clone() if drift else None)

    def add(
        self,
        quantized: torch.Tensor,
        source: torch.Tensor | None,
        *,
        weights: torch.Tensor | None = None,
        share: float | None = None,
    ) -> None:
        """Add the same tokens of both streams, (..., in) each.

        `weights` (tokens,) float32 contains powers of two. `share` is a weight for all tokens of
        the call. Tokens added with a `share` are not counted in `tokens`.
        """
        rows = quantized.reshape(-1, quantized.shape[-1])
        alpha = 1.0 if share is None else share
        with exact_products(rows.dtype):
            wide = rows.to(torch.float32)
            weighed = wide if weights is None else wide * weights[:, None]
            for first, last in _blocks(self.hessian):
                block = self.hessian[first:last, :last]
                block.addmm_(weighed[:, first:last].T, wide[:, :last], alpha=alpha)
        if self.drift is not None:
            assert source is not None
            self._add_drift(rows, source.reshape(rows.shape), weights, alpha)
        if share is None:
            self.tokens += len(rows)

    def _add_drift(
        self, inputs: torch.Tensor, exact: torch.Tensor, weights: torch.Tensor | None, alpha: float
    ) -> None:
        """Add the products of the inputs and of their differences from the source.

        On a CPU, products of bf16 values are added up in float32 and rounded to bf16 once per row
        of text. This halves the time. The rounding error is small, because the drift is small
        compared to H. Other dtypes and devices compute in float32.
        """
        assert self.drift is not None
        if inputs.dtype != torch.bfloat16:
            inputs, exact = inputs.to(torch.float32), exact.to(torch.float32)
        change = exact.to(inputs.dtype) - inputs
        weighed = inputs if weights is None else inputs * weights[:, None].to(inputs.dtype)
        if inputs.device.type != "cpu":  # a GPU may add up parts of a sum in bf16
            with exact_products(inputs.dtype):
                self.drift.addmm_(
                    weighed.to(torch.float32).T, change.to(torch.float32), alpha=alpha
                )
            return
        self.drift.add_(weighed.T @ change, alpha=alpha)

    def all_reduce(self) -> None:
        """Sum the moments over all ranks. Every rank must call this."""
        all_reduce(self.hessian)
        if self.drift is not None:
            all_reduce(self.drift)
        tokens = torch.tensor(self.tokens, device=self.hessian.device)
        all_reduce(tokens)
        self.tokens = int(tokens)

    def complete(self) -> "Moments":
        """Fill the upper triangle of `hessian` in place, after all tokens were added."""
        for first, last in _blocks(self.hessian):
            self.hessian[:first, first:last] = self.hessian[first:last, :first].T
            # Both triangles of a block were computed, and their sums may differ in the last bits.
            block = self.hessian[first:last, first:last]
            block.copy_(block.tril() + block.tril(-1).T)
        return self


def _blocks(matrix: torch.Tensor) -> Iterator[tuple[int, int]]:
    for first in range(0, len(matrix), BLOCK_COLUMNS):
        yield first, min(first + BLOCK_COLUMNS, len(matrix))


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
