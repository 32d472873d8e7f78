"""The factor of a layer's second moments by which GPTQ passes errors on, damped until it exists."""

from dataclasses import dataclass

import torch

from vexport.numerics.arithmetic import Floats

# Damping is raised tenfold so many times before a layer is rounded to nearest instead.
ATTEMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """The upper Cholesky factor of the inverse of a damped H, its columns in the order of rounding.

    `order` (columns,) are the columns by falling diagonal of H, `damping` the share of its mean that was
    added, `dead` how many columns were always zero.
    """

    upper: Floats
    order: torch.Tensor
    damping: float
    dead: int


def factorize(hessian: torch.Tensor, damping: float) -> Factor | None:
    """The factor of H (in, in); None where H is not positive definite with any damping up to 1000 times that.

    A dead column's diagonal becomes 1: nothing depends on it.
    """
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    order = torch.argsort(diagonal, descending=True, stable=True)
    mean = diagonal.sum() / max(1, int((~dead).sum()))
    ordered = hessian[order][:, order]
    for attempt in range(ATTEMPTS):
        share = damping * 10**attempt
        added = torch.where(dead, 1.0, share * mean)
        upper = _inverse_factor(ordered + torch.diag(added[order]))
        if upper is not None:
            return Factor(upper=upper, order=order, damping=share, dead=int(dead.sum()))
    return None


def _inverse_factor(hessian: torch.Tensor) -> Floats | None:
    """U, upper, with U^T U = H^-1: the inverse of the Cholesky factor R, upper, with R R^T = H."""
    lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
    if failed:
        return None
    eye = torch.eye(len(hessian), device=hessian.device)
    upper = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
    if not bool(torch.isfinite(upper).all()):
        return None
    found: Floats = upper.contiguous().numpy()
    return found
