"""The groups of a layer rounded, each by the rank that added up what enters it, and given to all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from vexport.calibration.ranks import from_each, rank_and_size
from vexport.formats.packing.base import Array
from vexport.quantize.applied import QuantizedModel
from vexport.quantize.group_inputs import GroupInputs, Site
from vexport.quantize.ranked_sums import RankedSums
from vexport.quantize.round_sites import round_sites
from vexport.quantize.rounded_layers import Stored
from vexport.quantize.stream import quantized_group
from vexport.quantize.weight_scales import search_scales
from vexport.rounding.settings import GPTQ, Recipe
from vexport.types import FusionGroup
from vexport.types.rounding import GroupRounding, is_refit


def recipe_of(group: FusionGroup, site: Site, recipe: Recipe) -> Recipe:
    """The recipe of a branch, but for plain GPTQ and for groups that get other tokens in either stream."""
    return recipe if is_refit(group.rounding) and site.is_aligned else GPTQ


def round_by_owners(
    model: QuantizedModel,
    groups: Sequence[FusionGroup],
    inputs: GroupInputs,
    sums: RankedSums,
    branch: int,
    recipe: Recipe,
) -> tuple[Stored, tuple[GroupRounding, ...]]:
    """The bytes that replace the weights of groups, and how each was rounded. All ranks call.

    Raises InputError where a weight is not finite.
    """
    stored, how = dict[str, Array](), dict[str, GroupRounding]()
    for part, told in from_each(partial(_round_own, model, groups, inputs, sums, branch, recipe)):
        stored |= part
        how |= told
    names = [*inputs.unreachable, *(group.name for site in inputs.sites for group in site.groups)]
    return stored, tuple(how[name] for name in names)


def _round_own(
    model: QuantizedModel,
    groups: Sequence[FusionGroup],
    inputs: GroupInputs,
    sums: RankedSums,
    branch: int,
    recipe: Recipe,
) -> tuple[Stored, Mapping[str, GroupRounding]]:
    """Those that this rank owns; groups that no site has are dealt like rows."""
    own, stored = sums.own[branch], dict[str, Array]()
    made, how = round_sites(
        model,
        inputs,
        own,
        lambda group, site: _for_tokens(recipe_of(group, site, recipe), group, own[site.name].tokens),
    )
    rank, size = rank_and_size()
    owners = {group.name: sums.owners[branch, site.name] for site in inputs.sites for group in site.groups}
    for number, group in enumerate(groups):
        if owners.get(group.name, number % size) == rank:
            stored |= quantized_group(
                group,
                model.index,
                model.calibration,
                model.reader,
                search=search_scales,
                rounded=made.pop(group.name, {}),
            )
    return stored, how


def _for_tokens(recipe: Recipe, group: FusionGroup, tokens: int) -> Recipe:
    """The recipe with a ridge that grows where fewer tokens than columns show a refitted group's inputs."""
    if group.rounding != "refit":
        return recipe
    return replace(recipe, ridge=recipe.ridge * max(1.0, group.members[0].in_features / tokens))
