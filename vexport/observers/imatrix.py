"""Observers that weight the quantization error of a column by the importance of its inputs."""

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch

from vexport.numerics.ranks import gather
from vexport.observers.flatten import WEIGHT, flatten_for_calibration
from vexport.observers.mse import MemorylessMSE
from vexport.observers.search import Search, search_of
from vexport.records.observer_names import (
    IMPORTANCE_SEARCH,
    NVFP4_EXPANDED_IMPORTANCE,
    ImportanceOptions,
)

# Strategies for which llm-compressor weights errors by importance (observers/imatrix.py).
STRATEGIES = ("channel", "group", "tensor_group")


@dataclass(slots=True)
class Importance:
    """Sum of squared inputs per input channel, shape (in_features,), and the number of tokens.

    Squares are computed in float32 and summed in float64, so that the order of the samples makes no
    practical difference. llm-compressor sums in float32.
    """

    total: torch.Tensor
    tokens: int = 0

    @classmethod
    def zeros(cls, channels: int) -> "Importance":
        """Return an empty importance."""
        return cls(torch.zeros(channels, dtype=torch.float64))

    @classmethod
    def of(cls, inputs: torch.Tensor) -> "Importance":
        """Return the importance of inputs of shape (..., channels)."""
        # Over several dimensions, torch adds up float32 values in float64 25 times as slowly.
        squares = inputs.detach().reshape(-1, inputs.shape[-1]).to(torch.float32).pow(2)
        return cls(squares.sum(0, dtype=torch.float64), len(squares))

    def add(self, other: "Importance") -> None:
        """Add the importance of other tokens."""
        self.total = self.total.to(other.total.device) + other.total
        self.tokens += other.tokens

    def all_reduce(self) -> None:
        """Sum the importance of all ranks, on any device; every rank must call this method."""
        self.total = torch.stack(gather(self.total.cpu())).sum(0).to(self.total.device)
        self.tokens = sum(gather(self.tokens))

    def mean(self) -> torch.Tensor:
        """Return the mean squared input per channel: float32, shape (in_features,)."""
        return (self.total / float(self.tokens)).to(torch.float32)


class IMatrixMSE(MemorylessMSE):
    """Smallest quantization error, weighted by the mean square of each input channel [imatrix_mse].

    Set `gathered` to the importance before the weight is observed. Without importance, the observer
    warns and weights all errors equally. With `strict` it raises ValueError instead.
    """

    registry_name = "imatrix_mse"
    defaults: ClassVar[ImportanceOptions] = IMPORTANCE_SEARCH
    options: ImportanceOptions
    gathered: Importance | None = None

    @property
    def search(self) -> Search:
        """Candidates of the search: one step more than `memoryless_mse`."""
        steps = int(self.options.maxshrink * self.options.grid)
        return search_of(self.options, max(1, steps) + 1)

    def importance(self, channels: int) -> torch.Tensor | None:
        relative = self.relative_importance(channels)
        if relative is None:
            return None
        return flatten_for_calibration(relative.unsqueeze(0), self.base_name, self.args)

    def relative_importance(self, channels: int) -> torch.Tensor | None:
        """Return the importance of each column of the observed weight, divided by its mean.

        Returns None after a warning if there is no usable importance. Raises ValueError instead if
        `strict` is set.
        """
        problem = self._problem(channels)
        if problem or self.gathered is None:
            if self.options.strict:
                raise ValueError(
                    f"imatrix_mse: {problem}; gather importance first, or turn strict off"
                )
            warnings.warn(f"imatrix_mse: {problem}; all errors get the same weight", stacklevel=2)
            return None
        mean = self.gathered.mean()
        return mean / (mean.mean() + torch.finfo(torch.float32).tiny)

    def reset(self) -> None:
        super().reset()
        self.gathered = None

    def _problem(self, channels: int) -> str | None:
        if self.base_name != WEIGHT:
            return f"only weights have importance, got {self.base_name}"
        if self.strategy not in STRATEGIES:
            return (
                f"strategy {self.strategy} has no importance, need one of {', '.join(STRATEGIES)}"
            )
        if self.gathered is None or not self.gathered.tokens:
            return "no importance data available"
        total = self.gathered.total
        if total.numel() != channels:
            return f"size mismatch: expected {channels}, got {total.numel()}"
        return None if math.isfinite(total.sum()) and total.any() else "all zeros, or not finite"


class NVFP4ExpandedIMatrix(IMatrixMSE):
    """NVFP4 search by importance between 1.5 and 0.5 times the range [nvfp4_expanded_imatrix].

    A larger block scale may map the largest value of a block to 4 instead of 6. The e2m1 numbers
    around 4 are closer together than around 6 (four over six, arXiv 2512.02010).
    """

    registry_name = "nvfp4_expanded_imatrix"
    defaults: ClassVar[ImportanceOptions] = NVFP4_EXPANDED_IMPORTANCE
