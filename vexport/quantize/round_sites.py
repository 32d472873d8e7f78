"""All groups of some sites rounded, each H factorized once for the groups that share it."""

from collections.abc import Callable, Mapping, Sequence

from vexport.checkpoint.tensors import read_weight
from vexport.formats.packing.base import RoundedWeight
from vexport.quantize.applied import QuantizedModel
from vexport.quantize.group_inputs import GroupInputs, Site
from vexport.quantize.round_group import round_group
from vexport.rounding.gptq import Factor, factorize
from vexport.rounding.moments import Moments
from vexport.rounding.settings import Recipe
from vexport.types import FusionGroup
from vexport.types.rounding import GroupRounding

# The rounded weights of a group by layer name.
GroupWeights = Mapping[str, RoundedWeight]


def zero_moments(
    sites: Sequence[Site], recipe_of: Callable[[FusionGroup, Site], Recipe], device: str
) -> dict[str, Moments]:
    """Of no tokens yet, by the name of each site."""
    return {
        site.name: Moments.zeros(
            site.columns,
            cross=any(recipe_of(group, site).strength > 0 for group in site.groups),
            device=device,
        )
        for site in sites
    }


def round_sites(
    model: QuantizedModel,
    inputs: GroupInputs,
    sums: Mapping[str, Moments],
    recipe_of: Callable[[FusionGroup, Site], Recipe],
) -> tuple[dict[str, GroupWeights], dict[str, GroupRounding]]:
    """The rounded weights of the groups that `sums` are for, and how each was rounded, by the group's name.

    Groups whose input was not seen have no weights: they are rounded to nearest, and it is said why. Raises
    InputError where a weight is not finite.
    """
    made, how = dict[str, GroupWeights](), dict[str, GroupRounding]()
    for name, reason in inputs.unreachable.items():
        how[name] = GroupRounding(name=name, fallback=reason)
    for site in inputs.sites:
        if site.name not in sums:
            continue
        moments, factors = sums[site.name].complete(), dict[float, Factor | None]()
        for group in site.groups:
            if not moments.tokens:
                reason = "no token of the calibration text reaches it"
                how[group.name] = GroupRounding(name=group.name, fallback=reason)
                continue
            recipe = recipe_of(group, site)
            if recipe.ridge not in factors:
                factors[recipe.ridge] = factorize(moments.hessian, recipe.ridge)
            weights = [
                read_weight(model.reader, model.index.tensors[member.weight], member.part)
                for member in group.members
            ]
            factor = factors[recipe.ridge]
            made[group.name], how[group.name] = round_group(
                group, weights, moments, recipe, model.index, factor=factor
            )
            model.reader.release(model.index.tensors[member.weight] for member in group.members)
    return made, how
