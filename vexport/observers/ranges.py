"""Observers: min-max, searches for the smallest quantization error, and importance weighting."""

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
from vexport.observers.older import (
    as_scale_pair,
    call_older_method,
    flatten_dimensions,
    implied_range,
)
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

# Maximum growth of a range: the largest value of a block then becomes 4 instead of 6.
MAX_ROOM = 1.5
# Strategies with groups of input channels (llm-compressor, observers/imatrix.py).
STRATEGIES = ("channel", "group", "tensor_group")
# llm-compressor's names for the attributes of a module with the sums of importance and the number
# of tokens.
MODULE_SUM_NAMES = ("_imatrix_sum", "_imatrix_count")


class MemorylessMinMaxObserver(Observer):
    """Range of the last observed tensor [memoryless_minmax]."""

    registry_name = "memoryless_minmax"


class StaticMinMaxObserver(Observer):
    """Running minimum and maximum over all observed tensors [static_minmax]."""

    registry_name = "static_minmax"
    reduction: ClassVar[Reduction | None] = "extremes"

    def combine(self, old: Range, new: Range) -> Range:
        return torch.minimum(old[0], new[0]), torch.maximum(old[1], new[1])


class MinMaxObserver(Observer):
    """Moving average of minimum and maximum, `old * (1 - c) + new * c` [minmax].

    The first observation is used unchanged. `averaging_constant` 1.0 disables averaging.
    """

    registry_name = "minmax"
    defaults: ClassVar[AverageOptions] = AverageOptions()
    reduction: ClassVar[Reduction | None] = "average"

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        self.averaging_constant = self.read(self.defaults, keywords).averaging_constant

    def combine(self, old: Range, new: Range) -> Range:
        return moving_average(old, new, self.averaging_constant)


def moving_average(old: Range, new: Range, constant: float) -> Range:
    """Return `old * (1 - c) + new * c` for both ends, in the dtype of the ranges."""
    if constant == 1.0:
        return new
    low, high = (lerp(before, after, constant) for before, after in zip(old, new, strict=True))
    return low, high


def lerp(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    """Interpolate linearly: `start * (1 - weight) + end * weight`.

    This also works for dtypes that `torch.lerp` does not support.
    """
    return start * (1.0 - weight) + end * weight


class MemorylessMSEObserver(Observer):
    """Range with the smallest quantization error for the last tensor [memoryless_mse].

    For NVFP4 weights, the search tries only block scales that can be stored. The reported range is
    then the minimum and maximum of the values, without a search.
    """

    registry_name = "memoryless_mse"
    defaults: ClassVar[SearchOptions] = SEARCH

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        self.options = self.read(self.defaults, keywords)
        # Older subclasses may set these after the constructor.
        self.maxshrink, self.patience = self.options.maxshrink, self.options.patience
        self.grid, self.norm, self.expand = (
            self.options.grid,
            self.options.norm,
            self.options.expand,
        )
        self._importance: torch.Tensor | None = None

    @property
    def _search_options(self) -> SearchOptions:
        """Search options with the current attributes."""
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
        """Candidates of the search."""
        return search_of(self._search_options, int(self.maxshrink * self.grid))

    def importance(self, channels: int) -> torch.Tensor | None:
        """Return the weights of the errors, or None if all errors have equal weights.

        The weights broadcast to observations.
        """
        return None

    def prepare(self, tiles: Tiles) -> None:
        self._importance = self.importance(tiles.shape[-1] * tiles.shape[-2])

    def find_range(self, tiles: Tiles) -> Range:
        return search_grid(tiles, self.args, self.search, self._importance)

    def weight_scales(
        self, tiles: Tiles, global_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Search the scales of a weight, given the global scale."""
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
        """Return a tensor's range with the smallest error. Dimensions in `reduce_dims` get size 1.

        For NVFP4 with a global scale, return the range that yields the best block scale.
        """
        flat, shape = flatten_dimensions(observed, reduce_dims)
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
        return as_scale_pair(
            call_older_method(self.calculate_mse_min_max, observed, given), "calculate_mse_min_max"
        )


@torch.no_grad()
def fit_global_scale(observers: Sequence[Observer]) -> None:
    """Choose the global scale with the smaller error, measured on some rows of fused NVFP4 weights.

    The usual global scale, 2688 / absmax, gives the block of the largest value the largest possible
    scale. If the search may expand ranges, this block needs an even larger scale, and a smaller
    global scale makes room for it. A smaller global scale reduces the error if all values are of
    about equal size. For other weights it increases the error a little. Both global scales are
    therefore tried.

    Call this function after the observers were fused and have all observed their weights.
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

    best = min((1.0, 1 / min(room, MAX_ROOM)), key=error)
    for member in members:
        member.factor = best


class MovingAverageMSEObserver(MemorylessMSEObserver):
    """Moving average of the ranges with the smallest quantization error [mse].

    The first observation is used unchanged. `averaging_constant` 1.0 disables averaging.
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
    """NVFP4 search by error between 1.8 and 0.8 times the range [nvfp4_expanded_mse]."""

    registry_name = "nvfp4_expanded_mse"
    aliases = ("fouroversix",)
    defaults: ClassVar[SearchOptions] = NVFP4_EXPANDED_SEARCH


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

    `attach(module)` starts collecting importance from the module's inputs, in a pass before the
    weight is observed. `detach` stops it. `gathered` may also be set to importance collected
    elsewhere. Without importance, a warning is given once and errors are weighted equally. With
    `strict`, missing importance is a ValueError.
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
        """Candidates of the search, including the last step."""
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

    A larger block scale may map the largest value of a block to 4. There e2m1 is finer than next to
    6 (four over six, arXiv 2512.02010).
    """

    registry_name = "nvfp4_expanded_imatrix"
    defaults: ClassVar[ImportanceOptions] = NVFP4_EXPANDED_IMPORTANCE
