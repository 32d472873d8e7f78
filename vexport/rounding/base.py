"""What a way of rounding is: a class that satisfies `Method`, in its own file, listed in `methods`."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from vexport.rounding.factor import Factor
from vexport.rounding.grid import Grid
from vexport.rounding.moments import Moments
from vexport.rounding.settings import Recipe


@runtime_checkable
class Method(Protocol):
    """Rounds the weights (out, in) of layers that share one input."""

    def recipes(self, *, layers: int, held_out: int) -> Sequence[Recipe]:
        """What runs next to each other, to be chosen from by the rows held out; one where there are none."""
        ...

    def target(self, weight: torch.Tensor, moments: Moments, recipe: Recipe, factor: Factor) -> torch.Tensor:
        """The weights (out, in) float32 that are to be rounded in the place of `weight`."""
        ...

    def round(self, target: torch.Tensor, factor: Factor, grid: Grid) -> torch.Tensor:
        """The rounded weights (out, in) float32, every value of them a number of the grid."""
        ...
