"""The observers: min-max, searches for the least quantization error, and errors weighted by
importance.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.utils.hooks import RemovableHandle

from vexport.numerics.ranks import gather
from vexport.observers.base import Observer, Reduction
from vexport.observers.flatten import WEIGHT, Tiles, flatten_for_calibration, tiles_of_observations
from vexport.observers.older import as_pair, called, implied_range, kept_and_reduced
from vexport.observers.qparams import is_nvfp4
from vexport.observers.search import (
    Range,
    Search,
    block_scales,
    nvfp4_error,
    scales_of_rows,
    search_grid,
    search_of,
    search_rows,
)
from vexport.records.observer_names import (
    IMPORTANCE_SEARCH,
    NVFP4_EXPANDED_IMPORTANCE,
    NVFP4_EXPANDED_SEARCH,
    SEARCH,
    AverageOptions,
    AverageSearchOptions,
    ImportanceOptions,
    OptionValue,
    SearchOptions,
)

# The largest value of a block becomes a 4 instead of a 6.
MOST_ROOM = 1.5
# Where a weight's columns are input channels within each group (llm-compressor,
# observers/imatrix.py).
STRATEGIES = ("channel", "group", "tensor_group")
# The sums of importance and the number of tokens, as llm-compressor leaves them on a module.
LEFT_ON_MODULE = ("_imatrix_sum", "_imatrix_count")


class MemorylessMinMaxObserver(Observer):
    """The range of the last tensor observed [memoryless_minmax]."""

    registry_name = "memoryless_minmax"


class StaticMinMaxObserver(Observer):
    """The running minimum and maximum over all tensors observed [static_minmax]."""

    registry_name = "static_minmax"
    reduction: ClassVar[Reduction | None] = "extremes"

    def combine(self, old: Range, new: Range) -> Range:
        return torch.minimum(old[0], new[0]), torch.maximum(old[1], new[1])


class MinMaxObserver(Observer):
    """A moving average of minimum and maximum, `old * (1 - c) + new * c` [minmax].

    The first observation is taken as it is; `averaging_constant` 1.0 turns the averaging off.
    """

    registry_name = "minmax"
    defaults: ClassVar[AverageOptions] = AverageOptions()
    reduction: ClassVar[Reduction | None] = "average"

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        self.averaging_constant = self.read(self.defaults, keywords).averaging_constant

    def combine(self, old: Range, new: Range) -> Range:
        return moving_average(old, new, self.averaging_constant)


def moving_average(old: Range, new: Range, constant: float) -> Range:
    """`old * (1 - c) + new * c` at both ends, in the ranges' dtype."""
    if constant == 1.0:
        return new
    low, high = (lerp(before, after, constant) for before, after in zip(old, new, strict=True))
    return low, high


def lerp(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    """Linear interpolation, `start * (1 - weight) + end * weight`, for dtypes that `torch.lerp`
    lacks too.
    """
    return start * (1.0 - weight) + end * weight


class MemorylessMSEObserver(Observer):
    """The range of the last tensor that has the least quantization error [memoryless_mse].

    NVFP4 weights are searched among the block scales that can be stored; their range is that of the
    values.
    """

    registry_name = "memoryless_mse"
    defaults: ClassVar[SearchOptions] = SEARCH

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        self.options = self.read(self.defaults, keywords)
        # A subclass of the older generation may set these after the constructor.
        self.maxshrink, self.patience = self.options.maxshrink, self.options.patience
        self.grid, self.norm, self.expand = (
            self.options.grid,
            self.options.norm,
            self.options.expand,
        )
        self._importance: torch.Tensor | None = None

    @property
    def _searched(self) -> SearchOptions:
        """The options as they are set now."""
        return replace(
            self.options,
            maxshrink=self.maxshrink,
            patience=self.patience,
            grid=self.grid,
            norm=self.norm,
            expand=self.expand,
        )

    @property
    def search(self) -> Search:
        """The candidates."""
        return search_of(self._searched, int(self.maxshrink * self.grid))

    def importance(self, channels: int) -> torch.Tensor | None:
        """The weight of each error, broadcasting to observations; None weights all alike."""
        return None

    def prepare(self, tiles: Tiles) -> None:
        self._importance = self.importance(tiles.shape[-1] * tiles.shape[-2])

    def find_range(self, tiles: Tiles) -> Range:
        return search_grid(tiles, self.args, self.search, self._importance)

    def weight_scales(
        self, tiles: Tiles, global_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Search, now that the global scale is known."""
        if is_nvfp4(self.args) and global_scale is not None:
            scale = torch.empty(tiles.groups, device=tiles.device)
            for rows, tile in tiles.by_rows():
                scale[rows] = block_scales(tile[0], global_scale, self.search, self._importance)
            return scale, torch.zeros(scale.shape, dtype=torch.int32, device=scale.device)
        ranges = search_rows(tiles, self.args, self.search, self._importance)
        return scales_of_rows(ranges, tiles, self.args, global_scale)

    def calculate_mse_min_max(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> Range:
        """The range of a tensor with the least error, of size 1 in the dimensions `reduce_dims`.

        With the global scale of NVFP4, the range of the best scale that can be stored.
        """
        flat, shape = kept_and_reduced(observed, reduce_dims)
        tiles = tiles_of_observations(flat)
        self.prepare(tiles)
        if global_scale is not None and is_nvfp4(self.args):
            scales = self.weight_scales(tiles, global_scale)
            low, high = implied_range(scales, self.args, global_scale)
        else:
            low, high = self.find_range(tiles)
        return low.reshape(shape), high.reshape(shape)

    def _new_range(
        self,
        observed: torch.Tensor,
        reduce_dims: tuple[int, ...] | None,
        global_scale: torch.Tensor | None,
    ) -> Range:
        given = {"reduce_dims": reduce_dims, "global_scale": global_scale}
        return as_pair(called(self.calculate_mse_min_max, observed, given), "calculate_mse_min_max")


@torch.no_grad()
def fit_global_scale(observers: Sequence[Observer]) -> None:
    """Choose the global scale that fused NVFP4 weights share, by the error in some rows of all of
    them.

    With 2688 / absmax the block of the largest value has the largest scale that there is. Where the
    search may take a larger one, a smaller global scale leaves it room: best for weights that are
    all about as large, while others lose a little. Fuse the observers before, and let all observe.
    """
    members = [observer for observer in observers if isinstance(observer, MemorylessMSEObserver)]
    room = max((member.expand for member in members), default=1.0)
    if len(members) < len(observers) or room <= 1:
        return

    def error(factor: float) -> float:
        for member in members:
            member.factor = factor
        return sum(
            nvfp4_error(member._weight, scale, member.search, member._importance)
            for member in members
            if member._weight is not None and (scale := member.global_scale()) is not None
        )

    best = min((1.0, 1 / min(room, MOST_ROOM)), key=error)
    for member in members:
        member.factor = best


class MovingAverageMSEObserver(MemorylessMSEObserver):
    """A moving average of the ranges with the least quantization error [mse].

    The first observation is taken as it is; `averaging_constant` 1.0 turns the averaging off.
    """

    registry_name = "mse"
    defaults: ClassVar[AverageSearchOptions] = AverageSearchOptions()
    reduction: ClassVar[Reduction | None] = "average"

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        super().configure(keywords)
        self.averaging_constant = self.read(self.defaults, keywords).averaging_constant

    def combine(self, old: Range, new: Range) -> Range:
        return moving_average(old, new, self.averaging_constant)


class NVFP4ExpandedMSEObserver(MemorylessMSEObserver):
    """Least quantization error between 1.8 and 0.8 times the range, for NVFP4
    [nvfp4_expanded_mse].
    """

    registry_name = "nvfp4_expanded_mse"
    aliases = ("fouroversix",)
    defaults: ClassVar[SearchOptions] = NVFP4_EXPANDED_SEARCH


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
        """Add inputs of shape (..., channels)."""
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


class IMatrixMSEObserver(MemorylessMSEObserver):
    """Least quantization error weighted by the mean square of each input channel [imatrix_mse].

    `attach(module)` starts to gather from the module's inputs in a pass before the weight is
    observed, `detach` ends that; `gathered` may also be set to what was gathered elsewhere. Without
    importance errors are weighted alike after one warning, or ValueError under `strict`.
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
        """The candidates: here the last step is included."""
        return search_of(self._searched, max(1, int(self.maxshrink * self.grid)) + 1)

    def attach(self, module: torch.nn.Module) -> None:
        """Gather from the inputs of a module that has `in_features`; other modules are ignored.

        If the observer of an earlier pass left its sums on the module, these are taken, and nothing
        is gathered.
        """
        self._stop()
        channels = getattr(module, "in_features", None)
        if not isinstance(channels, int):
            return
        total, tokens = (getattr(module, name, None) for name in LEFT_ON_MODULE)
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
        """Stop gathering. The observer keeps the importance, and the module gets its sums.

        They are llm-compressor's: `_imatrix_sum` (in_features,) and `_imatrix_count`, the number of
        tokens.
        """
        was_gathering = self._hook is not None
        self._stop()
        if was_gathering and self.gathered is not None and self.gathered.tokens:
            for name, value in zip(
                LEFT_ON_MODULE,
                (self.gathered.total, torch.tensor(self.gathered.tokens)),
                strict=True,
            ):
                setattr(module, name, value)

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def importance(self, channels: int) -> torch.Tensor | None:
        """The gathered importance divided by its mean, broadcasting to a weight's observations."""
        problem = self._problem(channels)
        if problem or self.gathered is None:
            if self.strict:
                raise ValueError(
                    f"imatrix_mse: {problem}; gather importance first, or do without strict"
                )
            warnings.warn(f"imatrix_mse: {problem}; errors are weighted alike", stacklevel=2)
            return None
        mean = self.gathered.mean()
        mean = mean / (mean.mean() + torch.finfo(torch.float32).tiny)
        mean = mean if self._order is None else mean.to(self._order.device)[self._order]
        return flatten_for_calibration(mean.unsqueeze(0), self.base_name, self.args)

    def reset(self) -> None:
        """Drop all observations and the gathered importance."""
        super().reset()
        self.gathered = None

    def reduce_over_ranks(self) -> None:
        """Sum the gathered importance over all ranks."""
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
    """The same search between 1.5 and 0.5 times the range, for NVFP4 [nvfp4_expanded_imatrix].

    With a larger block scale the largest value of a block may become 4, next to which e2m1 is finer
    than next to 6 (four over six, arXiv 2512.02010).
    """

    registry_name = "nvfp4_expanded_imatrix"
    defaults: ClassVar[ImportanceOptions] = NVFP4_EXPANDED_IMPORTANCE
