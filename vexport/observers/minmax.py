"""Min-max observers: memoryless, running and moving average."""

import torch

from vexport.observers.args import ObserverArgs
from vexport.observers.base import Observer, Range

# llm-compressor's default, `MovingAverageMinMaxObserver`.
AVERAGING_CONSTANT = 0.01


class MemorylessMinMaxObserver(Observer):
    """The range of the last tensor observed [memoryless_minmax]."""

    def combine(self, low: torch.Tensor, high: torch.Tensor) -> Range:
        """The new range replaces the old one."""
        return low, high


class StaticMinMaxObserver(Observer):
    """The running minimum and maximum over all tensors observed [static_minmax]."""

    def combine(self, low: torch.Tensor, high: torch.Tensor) -> Range:
        """The union of both ranges."""
        if self.low is None or self.high is None:
            return low, high
        return torch.minimum(self.low, low), torch.maximum(self.high, high)


class MinMaxObserver(Observer):
    """A moving average of minimum and maximum, `old * (1 - c) + new * c` [minmax].

    The first observation is taken as it is; `averaging_constant` 1.0 turns the averaging off.
    """

    def __init__(
        self, base_name: str, args: ObserverArgs, averaging_constant: float = AVERAGING_CONSTANT
    ) -> None:
        super().__init__(base_name, args)
        self.averaging_constant = averaging_constant

    def combine(self, low: torch.Tensor, high: torch.Tensor) -> Range:
        """The moving average of both ranges."""
        if self.low is None or self.high is None:
            return low, high
        weight = self.averaging_constant
        return self.low * (1 - weight) + low * weight, self.high * (1 - weight) + high * weight
