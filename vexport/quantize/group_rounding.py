"""Round the weights of fusion groups with the moments of their inputs."""

from collections.abc import Mapping, Sequence

import torch

from vexport.calibration.inputs import Site
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.tensors import TORCH_DTYPES, read_weight
from vexport.formats.packing.base import Array, RoundedWeight, Scales
from vexport.formats.plan import FusionGroup
from vexport.numerics.ranks import gather, rank_and_size
from vexport.quantize.gptq import (
    Factor,
    Grid,
    Strength,
    factorize,
    grid_of,
    refit,
    round_columns,
    round_nearest,
    stack,
)
from vexport.quantize.input_moments import InputMoments
from vexport.quantize.moments import Moments
from vexport.quantize.quantized_model import QuantizedModel
from vexport.quantize.scale_search import fused_scales, observe_weight
from vexport.quantize.stream import Stored, quantized_group
from vexport.records import LinearPlan
from vexport.records.calibration import GroupRounding

# The rounded weights of a group by layer name.
GroupWeights = Mapping[str, RoundedWeight]
# Number of a group's rows for the reported errors. Measuring all rows would take as long as
# rounding.
MEASURED_ROWS = 64


def round_groups(
    model: QuantizedModel, moments: InputMoments, groups: Sequence[FusionGroup]
) -> tuple[Stored, Mapping[str, GroupRounding]]:
    """Return the bytes that replace the weights of groups, and how the groups were rounded.

    Every rank must call this. Each rank rounds a part of the sites, and a part of the groups
    without a site. Raises InputError if a weight is not finite.
    """
    moments.all_reduce()
    rank, size = rank_and_size()
    owners: dict[str, int] = {}
    for place, site in enumerate(moments.sites):
        owners |= {group.name: place % size for group in site.groups_rounded_by_text}
    rounded, how = round_sites(model, moments, moments.sites[rank::size])
    stored = dict[str, Array]()
    for number, group in enumerate(groups):
        if owners.get(group.name, number % size) == rank:
            known = rounded.pop(group.name, {})
            stored |= quantized_group(group, model.index, model.calibration, model.reader, known)
    for others, more in gather((stored, how)):
        stored |= others
        how |= more
    return stored, how


def round_sites(
    model: QuantizedModel, moments: InputMoments, sites: Sequence[Site]
) -> tuple[dict[str, GroupWeights], dict[str, GroupRounding]]:
    """Return the rounded weights of the sites' groups, and a report on each group, by group name.

    A group without observed inputs is rounded to nearest later. Such a group is missing from the
    first mapping, and the second mapping contains the reason. Raises InputError if a weight is not
    finite.
    """
    weights = dict[str, GroupWeights]()
    how = dict[str, GroupRounding]()
    for site in sites:
        moments_of_site = moments.of(site)
        factors = dict[float, Factor | None]()
        for group in site.groups_rounded_by_text:
            if not moments_of_site.tokens:
                reason = "no calibration token reaches it"
                how[group.name] = GroupRounding(name=group.name, fallback=reason)
                continue
            strength = moments.strength(group, site, moments_of_site.tokens)
            if strength.ridge not in factors:
                factors[strength.ridge] = factorize(moments_of_site.hessian, strength.ridge)
            weights[group.name], how[group.name] = round_group(
                group,
                [_source_weight(model, member) for member in group.members],
                moments_of_site,
                strength,
                model.index,
                factor=factors[strength.ridge],
            )
            model.reader.release(model.index.tensors[member.weight] for member in group.members)
    return weights, how


def _source_weight(model: QuantizedModel, member: LinearPlan) -> torch.Tensor:
    return read_weight(model.reader, model.index.tensors[member.weight], member.part)


def round_group(
    group: FusionGroup,
    weights: Sequence[torch.Tensor],
    moments: Moments,
    strength: Strength,
    index: SourceIndex,
    *,
    factor: Factor | None,
) -> tuple[Mapping[str, RoundedWeight], GroupRounding]:
    """Round the weights (out, in) of a group's layers, which share an input.

    Returns the rounded weights by layer name, and how the group was rounded. `factor` is the factor
    of the moments' H with the strength's ridge, or None if H is not positive definite. Raises
    InputError if a weight is not finite.
    """
    source = torch.cat([weight.to(moments.hessian.device).to(torch.float32) for weight in weights])
    wanted = source
    if factor and strength.strength:
        wanted = refit(source, moments, factor, strength=strength.strength)
    sizes = [len(weight) for weight in weights]
    scales, grid = _scales_and_grid(group, torch.split(wanted, sizes), moments, index)
    rounded = round_columns(wanted, factor, grid) if factor else round_nearest(wanted, grid)
    nearest_error, error = _errors(source, wanted, rounded, grid, moments.hessian)
    weights_of_layer = {
        member.name: RoundedWeight(values=part.cpu().numpy(), scales=scales_of_member)
        for member, part, scales_of_member in zip(
            group.members, torch.split(rounded, sizes), scales, strict=True
        )
    }
    return weights_of_layer, GroupRounding(
        name=group.name,
        rounding="nearest" if factor is None else _name(group, strength),
        strength=strength.strength if factor else 0.0,
        weighs_tokens=strength.weighs_tokens,
        columns=source.shape[1],
        fallback=None if factor else "H is not positive definite",
        damping=factor.damping if factor else 0.0,
        tokens=moments.tokens,
        nearest_error=nearest_error,
        error=error,
    )


def _name(group: FusionGroup, strength: Strength) -> str:
    """Return the name of a group's rounding. A refit with strength 0 is called GPTQ."""
    return "gptq" if group.rounding == "refit" and not strength.strength else group.rounding


def _scales_and_grid(
    group: FusionGroup, weights: Sequence[torch.Tensor], moments: Moments, index: SourceIndex
) -> tuple[list[Scales], Grid]:
    """Return the scales of each weight, and the grid of the stacked weights.

    The group's weights share scales if the format requires this.
    """
    scheme = group.scheme
    dtypes = [TORCH_DTYPES[index.tensors[member.weight].dtype] for member in group.members]
    importance = moments.hessian.diagonal() / max(1, moments.tokens)
    observers = [
        observe_weight(member, weight, group, importance, stored=dtype)
        for member, weight, dtype in zip(group.members, weights, dtypes, strict=True)
    ]
    scales = fused_scales(observers)
    grids = []
    for member, scales_of_member, dtype in zip(group.members, scales, dtypes, strict=True):
        shape = (member.out_features, member.in_features)
        in_model_dtype = scheme.format.parameters(scheme.args, shape)["weight_scale"].in_model_dtype
        stored = dtype if in_model_dtype else torch.float32
        grids.append(grid_of(scheme.args.weights, scales_of_member, shape, stored))
    return scales, stack(grids, moments.hessian.device)


def _errors(
    source: torch.Tensor,
    wanted: torch.Tensor,
    rounded: torch.Tensor,
    grid: Grid,
    hessian: torch.Tensor,
) -> tuple[float, float]:
    """Return the relative output errors of rounding to nearest and of the rounded weights.

    The error of rounded weights Q is |X~ (Q - W)^T|^2 / |X~ W^T|^2. W are the source's weights, and
    X~ (tokens, in) is the input in the quantized model.

    The errors are measured on rows that are evenly spread over the group's rows.
    """
    rows = torch.linspace(0, len(source) - 1, min(len(source), MEASURED_ROWS)).to(
        source.device, torch.int64
    )
    exact = source[rows]
    to_nearest = round_nearest(wanted[rows], grid.rows(rows)) - exact
    outputs = torch.stack([exact, to_nearest, rounded[rows] - exact])
    moments = (outputs.flatten(0, 1) @ hessian).view_as(outputs)
    signal, before, after = (moments * outputs).sum((1, 2)).tolist()
    if not signal:
        return 0.0, 0.0
    return before / signal, after / signal
