"""Distances of tensors and distributions, a part at a time, so that float64 copies stay small.

It works on tensors without importing torch.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# A tensor that came back exactly has no error; a report needs a finite number.
EXACT_DB = 200.0
# Elements compared at once.
COMPARED = 1 << 22
# Positions in memory as float64 at once: 19 MB for a vocabulary of 152 k.
KL_ROWS = 16


def sqnr_db(signal: float, error: float) -> float:
    """Signal-to-quantization-noise ratio of two powers; EXACT_DB without error, -EXACT_DB without
    signal.
    """
    if error == 0 or signal == 0:
        return EXACT_DB if error == 0 else -EXACT_DB
    return round(10 * math.log10(signal / error), 3) if math.isfinite(error) else -EXACT_DB


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPower:
    """Over all elements: the power of the first tensor, and that of the difference."""

    signal: float = 0.0
    error: float = 0.0

    def __add__(self, other: "ErrorPower") -> "ErrorPower":
        """The error of both parts together."""
        return ErrorPower(signal=self.signal + other.signal, error=self.error + other.error)

    @property
    def sqnr_db(self) -> float:
        """See `sqnr_db`."""
        return sqnr_db(self.signal, self.error)

    @property
    def relative(self) -> float:
        """|second - first| / |first| in Frobenius norms."""
        return math.sqrt(self.error / self.signal) if self.signal else math.sqrt(self.error)


def quantization_error(exact: "torch.Tensor", other: "torch.Tensor") -> ErrorPower:
    """The error of a tensor against another of its shape."""
    signal = error = 0.0
    left, right = exact.reshape(-1), other.reshape(-1)
    for start in range(0, left.numel(), COMPARED):
        part = slice(start, start + COMPARED)
        old, new = left[part].double(), right[part].double()
        signal += float(old.square().sum())
        error += float((new - old).square().sum())
    return ErrorPower(signal=signal, error=error)


def kl_divergence(reference: "torch.Tensor", measured: "torch.Tensor") -> "torch.Tensor":
    """KL(reference || measured) of log-probabilities (positions, vocabulary): nats, float64,
    (positions,).

    A position with a NaN, or an infinite difference where the reference gives probability, is
    infinite. Raises ValueError where shapes differ.
    """
    if reference.shape != measured.shape:
        raise ValueError(
            f"log-probabilities: got {tuple(measured.shape)}, need {tuple(reference.shape)}"
        )
    divergence = reference.new_empty(len(reference)).double()
    for start in range(0, len(reference), KL_ROWS):
        rows = slice(start, start + KL_ROWS)
        expected, got = reference[rows].double(), measured[rows].double()
        probability = expected.exp()
        terms = (probability * (expected - got)).where(probability > 0, 0.0)
        divergence[rows] = (
            terms.sum(dim=-1).nan_to_num(nan=math.inf, posinf=math.inf).clamp(min=0.0)
        )
    return divergence


def divergence_of_logits(reference: "torch.Tensor", measured: "torch.Tensor") -> float:
    """The sum over positions of KL(reference || measured), nats, of logits (..., positions,
    vocabulary).

    Log-probabilities are float32, of a few positions at a time: those of a long row fill gigabytes.
    """
    total, expected, got = 0.0, reference.flatten(0, -2), measured.flatten(0, -2)
    for start in range(0, len(expected), KL_ROWS):
        rows = slice(start, start + KL_ROWS)
        pair = (logits[rows].float().log_softmax(dim=-1) for logits in (expected, got))
        total += float(kl_divergence(*pair).sum())
    return total
