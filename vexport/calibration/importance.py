"""Importance of input channels: the mean of x^2 over all tokens, gathered while calibration runs.

Sums are kept in float64, so that neither the order of the samples nor their split over ranks shows in the
float32 result.
"""

import base64

import torch


class ChannelImportance:
    """Gathers the mean of x^2 per input channel of one linear layer."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.tokens = 0

    def observe(self, value: torch.Tensor) -> None:
        """Take in activations (..., channels)."""
        flat = value.detach().reshape(-1, value.shape[-1]).to(torch.float32)
        added = flat.square().sum(0, dtype=torch.float64)
        self.total = added if self.total is None else self.total + added
        self.tokens += flat.shape[0]

    def mean(self) -> torch.Tensor:
        """The mean of x^2 per channel, float32. Raises ValueError where no token was seen."""
        if self.total is None or not self.tokens:
            raise ValueError("channel importance: got no token, need one before the mean is asked")
        return (self.total / self.tokens).to(torch.float32)


def encode_channels(values: torch.Tensor) -> str:
    """A float32 vector as JSON text: base64 of its little-endian bytes."""
    return base64.b64encode(values.to(torch.float32).cpu().numpy().astype("<f4").tobytes()).decode("ascii")
