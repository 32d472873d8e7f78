"""Observers of the smallest and the largest value, and of their moving average."""

from typing import ClassVar

import torch

from vexport.observers.base import RangeObserver
from vexport.observers.search import Range
from vexport.records.observer_names import AverageOptions, AverageSearchOptions


class MemorylessMinMax(RangeObserver):
    """Range of the last observed tensor [memoryless_minmax]."""

    registry_name = "memoryless_minmax"


class StaticMinMax(RangeObserver):
    """Running minimum and maximum over all observed tensors [static_minmax]."""

    registry_name = "static_minmax"
    reduction = "extremes"

    def combine(self, old: Range, new: Range) -> Range:
        return torch.minimum(old[0], new[0]), torch.maximum(old[1], new[1])


class MovingAverage(RangeObserver):
    """Base class of observers that combine ranges in a moving average."""

    reduction = "average"
    options: AverageOptions | AverageSearchOptions

    def combine(self, old: Range, new: Range) -> Range:
        return moving_average(old, new, self.options.averaging_constant)


class MinMax(MovingAverage):
    """Moving average of minimum and maximum, `old * (1 - c) + new * c` [minmax].

    The first observation is used unchanged. `averaging_constant` 1.0 disables averaging.
    """

    registry_name = "minmax"
    defaults: ClassVar[AverageOptions] = AverageOptions()


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
