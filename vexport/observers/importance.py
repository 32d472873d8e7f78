"""The importance of input channels: the mean of x squared (imatrix)."""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Importance:
    """Sum of x squared of each input channel, shape (in_features,), and the number of tokens.

    Squares are taken in float32. In float64 their sum is the same in any order of the samples, for
    practical purposes; the peer sums in float32.
    """

    total: torch.Tensor
    tokens: int = 0

    @classmethod
    def zeros(cls, channels: int) -> "Importance":
        """Nothing gathered yet."""
        return cls(torch.zeros(channels, dtype=torch.float64))

    def add(self, inputs: torch.Tensor) -> None:
        """Take in inputs of shape (..., channels)."""
        squares = inputs.detach().to(torch.float32).pow(2)
        dims = tuple(range(inputs.ndim - 1))
        self.total = self.total.to(inputs.device) + squares.sum(dims, dtype=self.total.dtype)
        self.tokens += inputs.numel() // inputs.shape[-1] if inputs.numel() else 0

    def mean(self) -> torch.Tensor:
        """Mean of x squared, float32, shape (in_features,)."""
        return (self.total / float(self.tokens)).to(torch.float32)

    def problem(self, channels: int) -> str | None:
        """Why it cannot weight a weight of that many input channels, or None where it can."""
        if not self.tokens:
            return "no importance data available"
        if self.total.numel() != channels:
            return f"size mismatch: expected {channels}, got {self.total.numel()}"
        if not bool(torch.isfinite(self.total).all()):
            return "contains non-finite values"
        if bool((self.total < 0).any()):
            return "contains negative values"
        return "all zeros" if bool((self.total == 0).all()) else None
