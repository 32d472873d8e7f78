"""Observers that search for the range with the smallest quantization error."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from vexport.observers.base import RangeObserver, ScalePair
from vexport.observers.flatten import Tiles
from vexport.observers.minmax import MovingAverage
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
    NVFP4_EXPANDED_SEARCH,
    SEARCH,
    AverageSearchOptions,
    SearchOptions,
)

# Largest factor by which `fit_global_scale` reduces the global scale. If a block scale is 1.5 times
# as large, the largest value of the block is stored as 4 instead of 6.
MAX_REDUCTION = 1.5


class MemorylessMSE(RangeObserver):
    """Range with the smallest quantization error for the last tensor [memoryless_mse].

    For NVFP4 weights, the search tries only block scales that can be stored. The reported range is
    then the minimum and maximum of the values, without a search.
    """

    registry_name = "memoryless_mse"
    defaults: ClassVar[SearchOptions] = SEARCH
    options: SearchOptions
    # Weights of the errors in the tensor that was observed last.
    _importance: torch.Tensor | None = None

    @property
    def search(self) -> Search:
        """Candidates of the search. The first range is always a candidate."""
        return search_of(self.options, max(1, int(self.options.maxshrink * self.options.grid)))

    def importance(self, channels: int) -> torch.Tensor | None:
        """Return the weights of the errors, or None if all errors have equal weights.

        The weights broadcast to observations.
        """
        return None

    def prepare(self, tiles: Tiles) -> None:
        self._importance = self.importance(tiles.shape[-1] * tiles.shape[-2])

    def find_range(self, tiles: Tiles) -> Range:
        return search_grid(tiles, self.args, self.search, self._importance)

    def weight_scales(self, tiles: Tiles, global_scale: torch.Tensor | None) -> ScalePair:
        """Search the scales of a weight, given the global scale."""
        if is_nvfp4(self.args) and global_scale is not None:
            scale = torch.empty(tiles.qparam_shape, device=tiles.device)
            for rows, tile in tiles.by_rows():
                scale[rows] = block_scales(tile[0], global_scale, self.search, self._importance)
            return scale, torch.zeros(scale.shape, dtype=torch.int32, device=scale.device)
        ranges = search_rows(tiles, self.args, self.search, self._importance)
        return scales_of_rows(ranges, tiles, self.args, global_scale)


@torch.no_grad()
def fit_global_scale(observers: Sequence[RangeObserver]) -> None:
    """Choose the global scale with the smaller error, measured on some rows of fused NVFP4 weights.

    The usual global scale, 2688 / absmax, gives the block of the largest value the largest possible
    scale. If the search may expand ranges, this block needs an even larger scale, and a smaller
    global scale makes room for it. A smaller global scale reduces the error if all values are of
    about equal size. For other weights it increases the error a little. Both global scales are
    therefore tried.

    Call this function after the observers were fused and have all observed their weights.
    """
    members = [observer for observer in observers if isinstance(observer, MemorylessMSE)]
    expand = max((member.options.expand for member in members), default=1.0)
    if len(members) < len(observers) or expand <= 1:
        return

    def error(factor: float) -> float:
        for member in members:
            member.fusion.factor = factor
        return sum(
            nvfp4_error(weight, scale, member.search, member._importance)
            for member in members
            if (weight := member.searched_weight()) is not None
            and (scale := member.global_scale()) is not None
        )

    best = min((1.0, 1 / min(expand, MAX_REDUCTION)), key=error)
    for member in members:
        member.fusion.factor = best


class MovingAverageMSE(MovingAverage, MemorylessMSE):
    """Moving average of the ranges with the smallest quantization error [mse].

    The first observation is used unchanged. `averaging_constant` 1.0 disables averaging.
    """

    registry_name = "mse"
    defaults: ClassVar[AverageSearchOptions] = AverageSearchOptions()
    options: AverageSearchOptions


class NVFP4ExpandedMSE(MemorylessMSE):
    """NVFP4 search by error between 1.8 and 0.8 times the range [nvfp4_expanded_mse]."""

    registry_name = "nvfp4_expanded_mse"
    defaults: ClassVar[SearchOptions] = NVFP4_EXPANDED_SEARCH
