"""What calibration text shows of a layer's input: second moments of two streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch


@dataclass(slots=True, kw_only=True)
class Moments:
    """Sums over tokens, float32 (in, in): `hessian` X~^T X~ and `cross` X~^T X.

    X~ (tokens, in) is the input in the quantized stream after the layer's own input rounding, X the one that
    the source's layer gets for the same token. `cross` is None where the source's stream is not followed.
    """

    hessian: torch.Tensor
    cross: torch.Tensor | None
    tokens: int = 0

    @classmethod
    def zeros(cls, columns: int, *, cross: bool, device: str | torch.device = "cpu") -> "Moments":
        """Of no tokens yet."""
        zero = torch.zeros(columns, columns, device=device)
        return cls(hessian=zero, cross=zero.clone() if cross else None)

    def add(
        self, quantized: torch.Tensor, source: torch.Tensor | None, *, weight: float | None = None
    ) -> None:
        """Take in the same tokens of both streams, (..., in) each; with a weight they are not counted."""
        found = quantized.reshape(-1, quantized.shape[-1])
        alpha = 1.0 if weight is None else weight
        with exact_products(found.dtype):
            wide = found.to(torch.float32)
            self.hessian.addmm_(wide.T, wide, alpha=alpha)
            if self.cross is not None:
                assert source is not None
                exact = source.reshape(found.shape).to(torch.float32)
                self.cross.addmm_(wide.T, exact, alpha=alpha)
        if weight is None:
            self.tokens += len(found)


@contextmanager
def exact_products(dtype: torch.dtype) -> Iterator[None]:
    """Within the block float32 matrices that hold bf16 values are multiplied by the CPU's bf16 units.

    Products of two bf16 numbers are exact in float32, in which they are added up: only the order of the sum
    differs (1e-6 of the result).
    """
    # torch's own stubs do not know this switch.
    switch: SimpleNamespace = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = switch.fp32_precision
    switch.fp32_precision = "bf16" if dtype == torch.bfloat16 else before
    try:
        yield
    finally:
        switch.fp32_precision = before
