"""Second moments of a layer's input in two streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from vexport.numerics.ranks import all_reduce

# Columns of H that are added up together, up to its diagonal: half the products of a whole matrix.
BLOCK_COLUMNS = 256


@dataclass(slots=True, kw_only=True)
class Moments:
    """Sums over tokens, float32 (in, in): `hessian` X~^T V X~ and `drift` X~^T V (X - X~).

    X~ (tokens, in) is the input in the quantized stream after the layer's own input rounding, X the one that
    the source's layer gets for the same token, V how much each token counts: 1, or its weight. `drift` is
    None where the source's stream is not followed.
    Tokens are added to the lower triangle of `hessian`; `complete` makes it symmetric.
    """

    hessian: torch.Tensor
    drift: torch.Tensor | None
    tokens: int = 0

    @classmethod
    def zeros(cls, columns: int, *, drift: bool, device: str | torch.device = "cpu") -> "Moments":
        """Of no tokens yet."""
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
        """Take in the same tokens of both streams, (..., in) each.

        `weights` (tokens,) float32 are powers of two, by which each counts; with a `share` for all of them
        they are not counted as tokens.
        """
        found = quantized.reshape(-1, quantized.shape[-1])
        alpha = 1.0 if share is None else share
        with exact_products(found.dtype):
            wide = found.to(torch.float32)
            weighed = wide if weights is None else wide * weights[:, None]
            for first, last in _blocks(self.hessian):
                block = self.hessian[first:last, :last]
                block.addmm_(weighed[:, first:last].T, wide[:, :last], alpha=alpha)
        if self.drift is not None:
            assert source is not None
            self._add_drift(found, source.reshape(found.shape), weights, alpha)
        if share is None:
            self.tokens += len(found)

    def _add_drift(
        self, found: torch.Tensor, exact: torch.Tensor, weights: torch.Tensor | None, alpha: float
    ) -> None:
        """Products of bf16 are added up in float32 and rounded once a row: a small error of what is small
        next to H, in half of the time. Those of others, and on other devices than the CPU, are float32."""
        assert self.drift is not None
        if found.dtype != torch.bfloat16:
            found, exact = found.to(torch.float32), exact.to(torch.float32)
        change = exact.to(found.dtype) - found
        weighed = found if weights is None else found * weights[:, None].to(found.dtype)
        if found.device.type != "cpu":  # where parts of a sum may be added up in bf16
            with exact_products(found.dtype):
                self.drift.addmm_(weighed.to(torch.float32).T, change.to(torch.float32), alpha=alpha)
            return
        self.drift.add_(weighed.T @ change, alpha=alpha)

    def all_reduce(self) -> None:
        """Add up what all ranks have taken in; all call."""
        all_reduce(self.hessian)
        if self.drift is not None:
            all_reduce(self.drift)
        tokens = torch.tensor(self.tokens, device=self.hessian.device)
        all_reduce(tokens)
        self.tokens = int(tokens)

    def complete(self) -> "Moments":
        """Fill the upper triangle of `hessian`, in place, when all tokens are in."""
        for first, last in _blocks(self.hessian):
            self.hessian[:first, first:last] = self.hessian[first:last, :first].T
            # Sums in another order may differ on both sides of the diagonal.
            block = self.hessian[first:last, first:last]
            block.copy_(block.tril() + block.tril(-1).T)
        return self


def _blocks(matrix: torch.Tensor) -> Iterator[tuple[int, int]]:
    for first in range(0, len(matrix), BLOCK_COLUMNS):
        yield first, min(first + BLOCK_COLUMNS, len(matrix))


@contextmanager
def exact_products(dtype: torch.dtype) -> Iterator[None]:
    """Within the block float32 products of 16-bit values run on units for them: bf16 of a CPU, TF32 of a GPU.

    Two such numbers have an exact product in float32, in which they are added up: only the order of the sum
    differs (1e-6 of the result).
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
