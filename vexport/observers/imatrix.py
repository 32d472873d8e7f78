"""The search for the range with the least error, each error weighted by how large its inputs are."""

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

# Where a weight's columns are input channels within each group (llm-compressor, observers/imatrix.py).
STRATEGIES = ("channel", "group", "tensor_group")


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

    def all_reduce(self) -> None:
        """Add up what all ranks have gathered, on whatever devices; all call."""
        self.total = torch.stack(gather(self.total.cpu())).sum(0).to(self.total.device)
        self.tokens = sum(gather(self.tokens))

    def mean(self) -> torch.Tensor:
        """Mean of x squared, float32, shape (in_features,)."""
        return (self.total / float(self.tokens)).to(torch.float32)

    def problem(self, channels: int) -> str | None:
        """The reason why it cannot weight that many input channels, or None where it can."""
        if not self.tokens:
            return "no importance data available"
        if self.total.numel() != channels:
            return f"size mismatch: expected {channels}, got {self.total.numel()}"
        if not bool(torch.isfinite(self.total).all()):
            return "contains non-finite values"
        if bool((self.total < 0).any()):
            return "contains negative values"
        return "all zeros" if bool((self.total == 0).all()) else None


class IMatrixMSEObserver(MemorylessMSEObserver):
    """Least quantization error weighted by the mean square of each input channel [imatrix_mse].

    `attach(module)` starts to gather from the module's inputs in a pass before the weight is observed,
    `detach` ends that; `gathered` may also be set to what was gathered elsewhere. Without importance errors
    are weighted alike after one warning, or ValueError under `strict`.
    """

    registry_name = "imatrix_mse"
    defaults: ClassVar[ImportanceOptions] = IMPORTANCE_SEARCH

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        """Read the keywords of the search and `strict`."""
        options = self.read(self.defaults, keywords)
        super().configure(keywords)
        self.strict = options.strict
        self.gathered: Importance | None = None
        self._hook: RemovableHandle | None = None

    @property
    def search(self) -> Search:
        """The candidates: here the last step is included."""
        return search_of(self.options, max(1, int(self.options.maxshrink * self.options.grid)) + 1)

    def attach(self, module: torch.nn.Module) -> None:
        """Gather from now on from the inputs of a module with `in_features`; other modules are left alone."""
        self.detach(module)
        channels = getattr(module, "in_features", None)
        if not isinstance(channels, int):
            return
        gathered = Importance.zeros(channels)
        self.gathered = gathered

        def gather(module: torch.nn.Module, inputs: tuple[object, ...]) -> None:
            first = inputs[0] if inputs else None
            if isinstance(first, torch.Tensor):
                gathered.add(first)

        self._hook = module.register_forward_pre_hook(gather)

    def detach(self, module: torch.nn.Module) -> None:
        """Stop to gather; the importance stays with the observer."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def importance(self, channels: int, order: torch.Tensor | None) -> torch.Tensor | None:
        """The gathered importance divided by its mean, broadcasting to a weight's observations."""
        problem = self._problem(channels)
        if problem is not None or self.gathered is None:
            if self.strict:
                raise ValueError(f"imatrix_mse: {problem}; gather importance first, or do without strict")
            warnings.warn(f"imatrix_mse: {problem}; errors are weighted alike", stacklevel=2)
            return None
        mean = self.gathered.mean()
        mean = mean / (mean.mean() + torch.finfo(torch.float32).tiny)
        row = mean if order is None else mean.index_select(0, order)
        return flatten_for_calibration(row.unsqueeze(0), self.base_name, self.args)

    def reset(self) -> None:
        """Forget everything seen and gathered."""
        super().reset()
        self.gathered = None

    def reduce_over_ranks(self) -> None:
        """Sum what was gathered over all ranks."""
        super().reduce_over_ranks()
        if self.gathered is not None:
            self.gathered.all_reduce()

    def _problem(self, channels: int) -> str | None:
        if self.base_name != WEIGHT:
            return f"only weights have importance, got {self.base_name}"
        if self.strategy not in STRATEGIES:
            return f"strategy {self.strategy} has no importance, need one of {', '.join(STRATEGIES)}"
        return self.gathered.problem(channels) if self.gathered else "no importance data available"


class NVFP4ExpandedIMatrixObserver(IMatrixMSEObserver):
    """The same search between 1.5 and 0.5 times the range, for NVFP4 [nvfp4_expanded_imatrix].

    With a larger block scale the largest value of a block may become 4, next to which e2m1 is finer than
    next to 6 (four over six, arXiv 2512.02010).
    """

    registry_name = "nvfp4_expanded_imatrix"
    defaults: ClassVar[ImportanceOptions] = NVFP4_EXPANDED_IMPORTANCE
