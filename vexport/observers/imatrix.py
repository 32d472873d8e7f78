"""Observers that weight the quantization error of a column by the importance of its inputs."""

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.utils.hooks import RemovableHandle

from vexport.numerics.ranks import gather
from vexport.observers.flatten import WEIGHT, flatten_for_calibration
from vexport.observers.mse import MemorylessMSEObserver
from vexport.observers.search import Search, search_of
from vexport.records.observer_names import (
    IMPORTANCE_SEARCH,
    NVFP4_EXPANDED_IMPORTANCE,
    ImportanceOptions,
    OptionValue,
)

# Strategies for which llm-compressor weights errors by importance (observers/imatrix.py).
STRATEGIES = ("channel", "group", "tensor_group")
# llm-compressor's names for the attributes of a module with the sums of importance and the number
# of tokens.
MODULE_SUM_NAMES = ("_imatrix_sum", "_imatrix_count")


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

    def add(self, inputs: torch.Tensor) -> None:
        """Add inputs of shape (..., channels)."""
        squares = inputs.detach().to(torch.float32).pow(2)
        dims = tuple(range(inputs.ndim - 1))
        self.total = self.total.to(inputs.device) + squares.sum(dims, dtype=self.total.dtype)
        self.tokens += inputs.numel() // inputs.shape[-1] if inputs.numel() else 0

    def all_reduce(self) -> None:
        """Sum the importance of all ranks, on any device; every rank must call this method."""
        self.total = torch.stack(gather(self.total.cpu())).sum(0).to(self.total.device)
        self.tokens = sum(gather(self.tokens))

    def mean(self) -> torch.Tensor:
        """Return the mean squared input per channel: float32, shape (in_features,)."""
        return (self.total / float(self.tokens)).to(torch.float32)


class IMatrixMSEObserver(MemorylessMSEObserver):
    """Smallest quantization error, weighted by the mean square of each input channel [imatrix_mse].

    `attach(module)` starts collecting importance from the module's inputs, and `detach(module)`
    stops it. Run the module in between, before the weight is observed. `gathered` may also be set
    to importance from another place. Without importance, the observer warns and weights all errors
    equally. With `strict` it raises ValueError instead.
    """

    registry_name = "imatrix_mse"
    defaults: ClassVar[ImportanceOptions] = IMPORTANCE_SEARCH

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        options = self.read(self.defaults, keywords)
        super().configure(keywords)
        self.strict = options.strict
        self.gathered: Importance | None = None
        self._hook: RemovableHandle | None = None

    @property
    def search(self) -> Search:
        """Candidates of the search: one step more than `memoryless_mse`."""
        return search_of(self._search_options, max(1, int(self.maxshrink * self.grid)) + 1)

    def attach(self, module: torch.nn.Module) -> None:
        """Collect importance from the inputs of a module with `in_features`; ignore other modules.

        If an earlier observer has stored sums on the module, use these sums and collect nothing.
        """
        self._stop()
        channels = getattr(module, "in_features", None)
        if not isinstance(channels, int):
            return
        total, tokens = (getattr(module, name, None) for name in MODULE_SUM_NAMES)
        if isinstance(total, torch.Tensor) and tokens is not None and int(tokens):
            self.gathered = Importance(total.to(torch.float64), int(tokens))
            return
        gathered = Importance.zeros(channels)
        self.gathered = gathered

        def gather(module: torch.nn.Module, inputs: tuple[object, ...]) -> None:
            first = inputs[0] if inputs else None
            first = first[0] if isinstance(first, tuple) and first else first
            if isinstance(first, torch.Tensor):
                gathered.add(first)

        self._hook = module.register_forward_pre_hook(gather)

    def detach(self, module: torch.nn.Module) -> None:
        """Stop collecting, and store the sums on the module. The observer keeps the importance.

        The sums have llm-compressor's names: `_imatrix_sum` (in_features,), and `_imatrix_count`
        for the number of tokens.
        """
        was_gathering = self._hook is not None
        self._stop()
        if was_gathering and self.gathered is not None and self.gathered.tokens:
            for name, value in zip(
                MODULE_SUM_NAMES,
                (self.gathered.total, torch.tensor(self.gathered.tokens)),
                strict=True,
            ):
                setattr(module, name, value)

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def importance(self, channels: int) -> torch.Tensor | None:
        """Return the importance divided by its mean; it broadcasts to a weight's observations.

        Returns None after a warning if there is no usable importance. Raises ValueError instead if
        `strict` is set.
        """
        problem = self._problem(channels)
        if problem or self.gathered is None:
            if self.strict:
                raise ValueError(
                    f"imatrix_mse: {problem}; gather importance first, or turn strict off"
                )
            warnings.warn(f"imatrix_mse: {problem}; all errors get the same weight", stacklevel=2)
            return None
        mean = self.gathered.mean()
        mean = mean / (mean.mean() + torch.finfo(torch.float32).tiny)
        mean = mean if self._order is None else mean.to(self._order.device)[self._order]
        return flatten_for_calibration(mean.unsqueeze(0), self.base_name, self.args)

    def reset(self) -> None:
        """Drop all observations and the collected importance."""
        super().reset()
        self.gathered = None

    def reduce_over_ranks(self) -> None:
        """Sum the collected importance over all ranks."""
        super().reduce_over_ranks()
        if self.gathered is not None:
            self.gathered.all_reduce()

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


class NVFP4ExpandedIMatrixObserver(IMatrixMSEObserver):
    """NVFP4 search by importance between 1.5 and 0.5 times the range [nvfp4_expanded_imatrix].

    A larger block scale may map the largest value of a block to 4 instead of 6. The e2m1 numbers
    around 4 are closer together than around 6 (four over six, arXiv 2512.02010).
    """

    registry_name = "nvfp4_expanded_imatrix"
    defaults: ClassVar[ImportanceOptions] = NVFP4_EXPANDED_IMPORTANCE
