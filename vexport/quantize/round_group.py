"""One fusion group rounded: its layers' weights one below the other, for the input that they share."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.tensors import TORCH_DTYPES
from vexport.formats.packing.base import RoundedWeight, Scales
from vexport.formats.schemes import get_scheme
from vexport.observers import Observer
from vexport.quantize.weight_scales import observe_weight, scales_of
from vexport.rounding.gptq import Factor
from vexport.rounding.grid import Grid, grid_of, stack
from vexport.rounding.methods import METHODS, round_nearest
from vexport.rounding.moments import Moments
from vexport.rounding.settings import Recipe
from vexport.types import FusionGroup
from vexport.types.rounding import GroupRounding

# Rows of a group that its reported errors are measured on: those of all take as long as the rounding.
MEASURED_ROWS = 64


def round_group(
    group: FusionGroup,
    weights: Sequence[torch.Tensor],
    moments: Moments,
    recipe: Recipe,
    index: SourceIndex,
    *,
    factor: Factor | None,
) -> tuple[Mapping[str, RoundedWeight], GroupRounding]:
    """Round the weights (out, in) of a group's layers, which share one input: by layer name, and how.

    `factor` is that of the moments' H with the recipe's ridge; None where H is not positive definite.
    Raises InputError where a weight is not finite.
    """
    source = torch.cat([weight.to(torch.float32) for weight in weights])
    method = METHODS[group.rounding]
    wanted = source if factor is None else method.target(source, moments, recipe, factor)
    sizes = [len(weight) for weight in weights]
    scales, grid = _scales_and_grid(group, torch.split(wanted, sizes), moments, index)
    rounded = round_nearest(wanted, grid) if factor is None else method.round(wanted, factor, grid)
    nearest_error, error = _errors(source, wanted, rounded, grid, moments.hessian)
    made = {
        member.name: RoundedWeight(values=part.numpy(), scales=found)
        for member, part, found in zip(group.members, torch.split(rounded, sizes), scales, strict=True)
    }
    return made, GroupRounding(
        name=group.name,
        rounding="nearest" if factor is None else _name(group, recipe),
        strength=recipe.strength if factor else 0.0,
        columns=source.shape[1],
        fallback=None if factor else "H is not positive definite",
        damping=factor.damping if factor else 0.0,
        dead_columns=factor.dead if factor else 0,
        tokens=moments.tokens,
        nearest_error=nearest_error,
        error=error,
    )


def _name(group: FusionGroup, recipe: Recipe) -> str:
    """What was done: a refit of no strength is GPTQ."""
    return "gptq" if group.rounding == "refit" and not recipe.strength else group.rounding


def _scales_and_grid(
    group: FusionGroup, weights: Sequence[torch.Tensor], moments: Moments, index: SourceIndex
) -> tuple[list[Scales], Grid]:
    """The scales of each weight, sharing what the group shares, and the numbers that they leave."""
    scheme = get_scheme(group.scheme)
    dtypes = [TORCH_DTYPES[index.tensors[member.weight].dtype] for member in group.members]
    importance = moments.hessian.diagonal() / max(1, moments.tokens)
    observers = [
        observe_weight(member, weight, group, importance, stored=dtype)
        for member, weight, dtype in zip(group.members, weights, dtypes, strict=True)
    ]
    Observer.fuse(observers)
    scales, grids = [scales_of(observer) for observer in observers], []
    for member, found, dtype in zip(group.members, scales, dtypes, strict=True):
        shape = (member.out_features, member.in_features)
        in_model_dtype = scheme.format.parameters(scheme.args, shape)["weight_scale"].in_model_dtype
        stored = dtype if in_model_dtype else torch.float32
        grids.append(grid_of(scheme.args.weights, found, shape, stored))
    return scales, stack(grids)


def _errors(
    source: torch.Tensor, wanted: torch.Tensor, rounded: torch.Tensor, grid: Grid, hessian: torch.Tensor
) -> tuple[float, float]:
    """|X~ (Q - W)^T|^2 / |X~ W^T|^2 to nearest and as rounded, of rows evenly spread over the group's."""
    rows = torch.linspace(0, len(source) - 1, min(len(source), MEASURED_ROWS)).to(torch.int64)
    exact, own = source[rows], replace(grid, scale=grid.scale[rows.numpy()], zero=grid.zero[rows.numpy()])
    signal = float((exact @ hessian * exact).sum())
    changes = (round_nearest(wanted[rows], own) - exact, rounded[rows] - exact)
    before, after = (float((change @ hessian * change).sum()) for change in changes)
    return (before / signal, after / signal) if signal else (0.0, 0.0)
