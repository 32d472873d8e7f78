"""A range that leaves out the largest values."""

import torch

from vexport.observers.base import Observer
from vexport.observers.flatten import Tiles
from vexport.observers.search import Range

KEPT = 0.999


class PercentileObserver(Observer):
    """The range within which 99.9 % of the min-max range lies [percentile]."""

    registry_name = "percentile"

    def find_range(self, tiles: Tiles) -> Range:
        """The min-max range, reduced by the same factor at both ends: float32, shape qparam_shape."""
        low, high = super().find_range(tiles)
        return low * torch.tensor(KEPT), high * torch.tensor(KEPT)
