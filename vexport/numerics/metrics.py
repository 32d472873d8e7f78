"""Distances of tensors and of distributions, computed in parts so that float64 copies stay small.

This module works on tensors without importing torch.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# SQNR in dB that is reported if two tensors are equal, because a report needs a finite number.
EXACT_DB = 200.0
# Number of elements compared at a time.
COMPARED_AT_ONCE = 1 << 22
# Number of positions converted to float64 at a time: 19 MB for a vocabulary of 152 k.
KL_ROWS = 16


def sqnr_db(signal: float, error: float) -> float:
    """Return the signal-to-quantization-noise ratio of two powers.

    Returns EXACT_DB if the error is zero. Returns -EXACT_DB if there is an error but no signal, or
    if the error is not finite.
    """
    if error == 0 or signal == 0:
        return EXACT_DB if error == 0 else -EXACT_DB
    return round(10 * math.log10(signal / error), 3) if math.isfinite(error) else -EXACT_DB


def decibels(ratio: float, unit: str = "") -> str:
    """Return a ratio in dB with one decimal and `unit`, `exact` without any error, or `n/a`.

    The ratio is `n/a` if the error is not finite, or if there is an error but no signal.
    """
    if ratio >= EXACT_DB:
        return "exact"
    return f"{ratio:.1f}{unit}" if ratio > -EXACT_DB else "n/a"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPower:
    """Power of the first tensor and power of the difference, over all elements."""

    signal: float = 0.0
    error: float = 0.0

    def __add__(self, other: "ErrorPower") -> "ErrorPower":
        """Return the powers of two parts of the same tensor together."""
        return ErrorPower(signal=self.signal + other.signal, error=self.error + other.error)

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio; see the function `sqnr_db`."""
        return sqnr_db(self.signal, self.error)

    @property
    def relative(self) -> float:
        """Frobenius norm of the difference, divided by the norm of the first tensor.

        If the first tensor is zero, this is the norm of the difference.
        """
        return math.sqrt(self.error / self.signal) if self.signal else math.sqrt(self.error)


def quantization_error(exact: "torch.Tensor", other: "torch.Tensor") -> ErrorPower:
    """Return the error of a tensor, relative to an exact tensor of the same shape."""
    signal = error = 0.0
    left, right = exact.reshape(-1), other.reshape(-1)
    for start in range(0, left.numel(), COMPARED_AT_ONCE):
        part = slice(start, start + COMPARED_AT_ONCE)
        old, new = left[part].double(), right[part].double()
        signal += float(old.square().sum())
        error += float((new - old).square().sum())
    return ErrorPower(signal=signal, error=error)


def kl_divergence(reference: "torch.Tensor", measured: "torch.Tensor") -> "torch.Tensor":
    """Return KL(reference || measured) of log-probabilities (positions, vocabulary), in nats.

    The result is float64 (positions,). It is infinite at a position where a term is NaN or
    infinite. Terms count only if the reference probability is above 0. Raises ValueError if the
    shapes differ.
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
    """Return KL(reference || measured) of logits (..., positions, vocabulary), summed.

    The result is in nats. Log-probabilities are computed in float32 for KL_ROWS positions at a
    time, because log-probabilities of all positions could take gigabytes of memory.
    """
    total, expected, got = 0.0, reference.flatten(0, -2), measured.flatten(0, -2)
    for start in range(0, len(expected), KL_ROWS):
        rows = slice(start, start + KL_ROWS)
        pair = (logits[rows].float().log_softmax(dim=-1) for logits in (expected, got))
        total += float(kl_divergence(*pair).sum())
    return total
