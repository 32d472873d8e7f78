"""Min-max observers: memoryless, running and moving average."""

from typing import ClassVar

import torch

from vexport.observers.base import Observer, Reduction
from vexport.observers.search import Range
from vexport.records.observer_names import AverageOptions, OptionValue


class MemorylessMinMaxObserver(Observer):
    """The range of the last tensor observed [memoryless_minmax]."""

    registry_name = "memoryless_minmax"


class StaticMinMaxObserver(Observer):
    """The running minimum and maximum over all tensors observed [static_minmax]."""

    registry_name = "static_minmax"
    reduction: ClassVar[Reduction | None] = "extremes"

    def combine(self, old: Range, new: Range) -> Range:
        """The union of both ranges."""
        return torch.minimum(old[0], new[0]), torch.maximum(old[1], new[1])


class MinMaxObserver(Observer):
    """A moving average of minimum and maximum, `old * (1 - c) + new * c` [minmax].

    The first observation is taken as it is; `averaging_constant` 1.0 turns the averaging off.
    """

    registry_name = "minmax"
    defaults: ClassVar[AverageOptions] = AverageOptions()
    reduction: ClassVar[Reduction | None] = "average"

    def configure(self, keywords: dict[str, OptionValue]) -> None:
        """Read `averaging_constant`."""
        self.averaging_constant = self.read(self.defaults, keywords).averaging_constant

    def combine(self, old: Range, new: Range) -> Range:
        """The moving average of both ranges."""
        return moving_average(old, new, self.averaging_constant)


def moving_average(old: Range, new: Range, constant: float) -> Range:
    """`old * (1 - c) + new * c` at both ends, in the ranges' dtype."""
    if constant == 1.0:
        return new
    low, high = (before * (1.0 - constant) + after * constant for before, after in zip(old, new, strict=True))
    return low, high
