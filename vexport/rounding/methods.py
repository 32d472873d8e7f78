"""The ways of rounding by name. Adding one is one class that satisfies `Method` and one entry here."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from vexport.numerics.arithmetic import round_values
from vexport.rounding.gptq import Factor, Gptq, Grid
from vexport.rounding.moments import Moments
from vexport.types.rounding import Rounding


@runtime_checkable
class Method(Protocol):
    """Rounds the weights (out, in) of layers that share one input."""

    def target(self, weight: torch.Tensor, moments: Moments, strength: float, factor: Factor) -> torch.Tensor:
        """The weights (out, in) float32 that are to be rounded in the place of `weight`."""
        ...

    def round(self, target: torch.Tensor, factor: Factor, grid: Grid) -> torch.Tensor:
        """The rounded weights (out, in) float32, every value of them a number of the grid."""
        ...


class Nearest:
    """The weights themselves, to the nearest number."""

    def target(self, weight: torch.Tensor, moments: Moments, strength: float, factor: Factor) -> torch.Tensor:
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


class Refit(Gptq):
    """Corrected weights, column after column."""

    def target(self, weight: torch.Tensor, moments: Moments, strength: float, factor: Factor) -> torch.Tensor:
        """The weights corrected by `strength`, with the ridge that H was damped with."""
        return refit(weight, moments, strength=strength, ridge=factor.damping) if strength else weight


def refit(weight: torch.Tensor, moments: Moments, *, strength: float, ridge: float) -> torch.Tensor:
    """The corrected weight (out, in) float32.

    `ridge` is lambda as a share of the mean of H's diagonal, with which H is positive definite.
    """
    assert moments.drift is not None
    shift = ridge * moments.hessian.diagonal().mean()
    eye = torch.eye(len(moments.hessian), device=weight.device) * shift
    lower = torch.linalg.cholesky(moments.hessian + eye)
    correction = torch.cholesky_solve(moments.drift @ weight.T, lower).T
    return torch.add(weight, correction, alpha=strength)


METHODS: Mapping[Rounding, Method] = {"nearest": Nearest(), "gptq": Gptq(), "refit": Refit()}
