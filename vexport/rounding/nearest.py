"""Each value becomes the nearest number: what is left where nothing is known of a layer's inputs."""

from collections.abc import Sequence

import torch

from vexport.numerics.arithmetic import round_values
from vexport.rounding.factor import Factor
from vexport.rounding.grid import Grid
from vexport.rounding.moments import Moments
from vexport.rounding.settings import Recipe


class Nearest:
    """The weights themselves, to the nearest number."""

    def recipes(self, *, layers: int, held_out: int) -> Sequence[Recipe]:
        """None: there is nothing to choose."""
        return ()

    def target(self, weight: torch.Tensor, moments: Moments, recipe: Recipe, factor: Factor) -> torch.Tensor:
        """The weights as they are."""
        return weight

    def round(self, target: torch.Tensor, factor: Factor, grid: Grid) -> torch.Tensor:
        """The nearest numbers."""
        return round_nearest(target, grid)


def round_nearest(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The nearest number of the grid for every value of a weight (out, in), float32."""
    columns = weight.shape[1]
    scale, zero = (
        torch.from_numpy(values).repeat_interleave(grid.width, dim=1)[:, :columns]
        for values in (grid.scale, grid.zero)
    )
    scaled = (weight / scale + zero).clamp(float(grid.form.low), float(grid.form.high)).contiguous()
    codes = scaled.numpy().reshape(-1)
    round_values(codes, grid.form)
    return (scaled - zero) * scale
