"""Observers that search for the range with the smallest quantization error."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from vexport.observers.base import Observer
from vexport.observers.flatten import Tiles, tiles_of_observations
from vexport.observers.minmax import AveragingObserver
from vexport.observers.older import (
    as_tensor_pair,
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
    NVFP4_EXPANDED_SEARCH,
    SEARCH,
    AverageSearchOptions,
    OptionValue,
    SearchOptions,
)

# Largest factor by which `fit_global_scale` reduces the global scale. If a block scale is 1.5 times
# as large, the largest value of the block is stored as 4 instead of 6.
MAX_REDUCTION = 1.5


class MemorylessMSEObserver(Observer):
    """Range with the smallest quantization error for the last tensor [memoryless_mse].

    For NVFP4 weights, the search tries only block scales that can be stored. The reported range is
    then the minimum and maximum of the values, without a search.
    """

    registry_name = "memoryless_mse"
    defaults: ClassVar[SearchOptions] = SEARCH

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        self.options = self.read(self.defaults, keywords)
        # Older subclasses may change these attributes after the constructor has returned.
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
            scale = torch.empty(tiles.qparam_shape, device=tiles.device)
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
        return as_tensor_pair(
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
    expand = max((member.expand for member in members), default=1.0)
    if len(members) < len(observers) or expand <= 1:
        return

    def error(factor: float) -> float:
        for member in members:
            member.factor = factor
        return sum(
            nvfp4_error(weight, scale, member.search, member._importance)
            for member in members
            if (weight := member.searched_weight()) is not None
            and (scale := member.global_scale()) is not None
        )

    best = min((1.0, 1 / min(expand, MAX_REDUCTION)), key=error)
    for member in members:
        member.factor = best


class MovingAverageMSEObserver(AveragingObserver, MemorylessMSEObserver):
    """Moving average of the ranges with the smallest quantization error [mse].

    The first observation is used unchanged. `averaging_constant` 1.0 disables averaging.
    """

    registry_name = "mse"
    defaults: ClassVar[AverageSearchOptions] = AverageSearchOptions()

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        super().configure(keywords)
        self.averaging_constant = self.read(self.defaults, keywords).averaging_constant


class NVFP4ExpandedMSEObserver(MemorylessMSEObserver):
    """NVFP4 search by error between 1.8 and 0.8 times the range [nvfp4_expanded_mse]."""

    registry_name = "nvfp4_expanded_mse"
    aliases = ("fouroversix",)
    defaults: ClassVar[SearchOptions] = NVFP4_EXPANDED_SEARCH
