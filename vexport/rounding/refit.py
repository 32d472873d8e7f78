"""Refit: weights that answer best to the inputs that a layer gets in the quantized model.

For the inputs X of the source's layer and X~ of the quantized model's, W* = W (G + lambda I)^T
(H + lambda I)^-1 minimises |X W^T - X~ W*^T|^2 + lambda |W* - W|^2, with H = X~^T X~ and G = X~^T X.
Source: Qronos (arXiv 2505.11695), whose strength is 1. On a deep model that shrinks the signal layer after
layer (errors in variables); so only a part of the way is gone: W + strength (W* - W).
"""

from collections.abc import Sequence

import torch

from vexport.rounding.factor import Factor
from vexport.rounding.gptq import Gptq
from vexport.rounding.moments import Moments
from vexport.rounding.settings import Recipe, refit_recipes


class Refit(Gptq):
    """Corrected weights, column after column."""

    def recipes(self, *, layers: int, held_out: int) -> Sequence[Recipe]:
        """Strengths from none on; a quarter where there is nothing to choose by."""
        return refit_recipes(layers, held_out)

    def target(self, weight: torch.Tensor, moments: Moments, recipe: Recipe, factor: Factor) -> torch.Tensor:
        """The weights corrected by the strength of the recipe, with the ridge that H was damped with."""
        if not recipe.strength:
            return weight
        return refit(weight, moments, strength=recipe.strength, ridge=factor.damping)


def refit(weight: torch.Tensor, moments: Moments, *, strength: float, ridge: float) -> torch.Tensor:
    """The corrected weight (out, in) float32.

    `ridge` is lambda as a share of the mean of H's diagonal, with which H is positive definite.
    """
    assert moments.cross is not None
    shift = ridge * moments.hessian.diagonal().mean()
    eye = torch.eye(len(moments.hessian), device=weight.device) * shift
    lower = torch.linalg.cholesky(moments.hessian + eye)
    solved = torch.cholesky_solve((moments.cross + eye) @ weight.T, lower).T
    return torch.lerp(weight, solved, strength)
