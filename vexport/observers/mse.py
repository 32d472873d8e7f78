"""Observers that search the range with the least quantization error: memoryless, moving average, NVFP4."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from vexport.observers.base import Observer, Reduction
from vexport.observers.flatten import Tiles
from vexport.observers.minmax import moving_average
from vexport.observers.qparams import is_nvfp4
from vexport.observers.search import (
    Range,
    Search,
    nvfp4_error,
    scales_of_rows,
    search_grid,
    search_nvfp4,
    search_of,
    search_rows,
)
from vexport.records.observer_names import (
    NVFP4_EXPANDED_SEARCH,
    SEARCH,
    AverageSearchOptions,
    OptionValue,
    SearchOptions,
)

# The largest value of a block becomes a 4 instead of a 6.
MOST_ROOM = 1.5


class MemorylessMSEObserver(Observer):
    """The range of the last tensor that has the least quantization error [memoryless_mse].

    NVFP4 weights are searched among the block scales that can be stored; their range is that of the values.
    """

    registry_name = "memoryless_mse"
    defaults: ClassVar[SearchOptions] = SEARCH

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        """Read the keywords of the search."""
        self.options = self.read(self.defaults, keywords)
        self._importance: torch.Tensor | None = None

    @property
    def search(self) -> Search:
        """The candidates."""
        return search_of(self.options, int(self.options.maxshrink * self.options.grid))

    def importance(self, channels: int, order: torch.Tensor | None) -> torch.Tensor | None:
        """The weight of each error, broadcasting to observations; None weights all alike."""
        return None

    def prepare(self, tiles: Tiles) -> None:
        """Take in the importance of what is searched."""
        self._importance = self.importance(tiles.shape[-1] * tiles.shape[-2], tiles.order)

    def find_range(self, tiles: Tiles) -> Range:
        """Search."""
        return search_grid(tiles, self.args, self.search, self._importance)

    def weight_scales(
        self, tiles: Tiles, global_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Search, now that the global scale is known."""
        if is_nvfp4(self.args) and global_scale is not None:
            scale = search_nvfp4(tiles, global_scale, self.search, self._importance)
            return scale, torch.zeros(scale.shape, dtype=torch.int32, device=scale.device)
        ranges = search_rows(tiles, self.args, self.search, self._importance)
        return scales_of_rows(ranges, tiles, self.args, global_scale)


def fit_global_scale(observers: Sequence[Observer]) -> None:
    """Choose the global scale that fused NVFP4 weights share, by the error in some rows of all of them.

    With 2688 / absmax the block of the largest value has the largest scale that there is. Where the search
    may take a larger one, a smaller global scale leaves it room: best for weights that are all about as
    large, while others lose a little. Fuse the observers before, and let all observe.
    """
    members = [observer for observer in observers if isinstance(observer, MemorylessMSEObserver)]
    room = max((member.options.expand for member in members), default=1.0)
    if len(members) < len(observers) or room <= 1:
        return
    shared = [(member._shared, member._weight) for member in members]
    errors = dict[float, float]()
    for factor in (1.0, 1 / min(room, MOST_ROOM)):
        for range_, _ in shared:
            if range_ is not None:
                range_.factor = factor
        scales = [member.global_scale() for member in members]
        errors[factor] = sum(
            nvfp4_error(tiles, scale, member.search, member._importance)
            for member, (_, tiles), scale in zip(members, shared, scales, strict=True)
            if tiles is not None and scale is not None
        )
    best = min(errors, key=lambda factor: errors[factor])
    for range_, _ in shared:
        if range_ is not None:
            range_.factor = best


class MovingAverageMSEObserver(MemorylessMSEObserver):
    """A moving average of the ranges with the least quantization error [mse].

    The first observation is taken as it is; `averaging_constant` 1.0 turns the averaging off.
    """

    registry_name = "mse"
    defaults: ClassVar[AverageSearchOptions] = AverageSearchOptions()
    reduction: ClassVar[Reduction | None] = "average"

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        """Read the keywords of the search and `averaging_constant`."""
        super().configure(keywords)
        self.averaging_constant = self.read(self.defaults, keywords).averaging_constant

    def combine(self, old: Range, new: Range) -> Range:
        """The moving average of both ranges."""
        return moving_average(old, new, self.averaging_constant)


class NVFP4ExpandedMSEObserver(MemorylessMSEObserver):
    """Least quantization error between 1.8 and 0.8 times the range, for NVFP4 [nvfp4_expanded_mse]."""

    registry_name = "nvfp4_expanded_mse"
    aliases = ("fouroversix",)
    defaults: ClassVar[SearchOptions] = NVFP4_EXPANDED_SEARCH
