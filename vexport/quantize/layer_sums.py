"""The moments of a layer's inputs in one stream; each of its groups is rounded by one rank, for all."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from vexport.formats.packing.base import Array
from vexport.numerics.ranks import gather, rank_and_size
from vexport.quantize.applied import QuantizedModel
from vexport.quantize.group_inputs import GroupInputs, Noted, Site
from vexport.quantize.round_sites import round_sites, zero_moments
from vexport.quantize.rounded_layers import Stored
from vexport.quantize.stream import quantized_group
from vexport.quantize.weight_scales import search_scales
from vexport.rounding.settings import GPTQ, Recipe
from vexport.types import FusionGroup
from vexport.types.rounding import GroupRounding, is_refit


def recipe_of(group: FusionGroup, site: Site, recipe: Recipe) -> Recipe:
    """The recipe of a branch, but for plain GPTQ and for groups that get other tokens in either stream."""
    return recipe if is_refit(group.rounding) and site.is_aligned else GPTQ


class LayerSums:
    """The moments of a layer's sites in one branch; each rank takes in its own rows."""

    def __init__(self, inputs: GroupInputs, recipe: Recipe, *, text: int, device: str) -> None:
        self._inputs, self._recipe, self._text = inputs, recipe, text
        self._moments = zero_moments(inputs.sites, partial(recipe_of, recipe=recipe), device)

    def add(self, quantized: Noted, source: Noted) -> None:
        """Take in what entered of one row in the branch's stream and in the source's."""
        for site in self._inputs.sites:
            weighs = all(recipe_of(group, site, self._recipe).weighs_tokens for group in site.groups)
            moments = self._moments[site.name]
            self._inputs.add(site, moments, quantized, source, text=self._text, weighs_tokens=weighs)

    def round(
        self, model: QuantizedModel, groups: Sequence[FusionGroup]
    ) -> tuple[Stored, tuple[GroupRounding, ...]]:
        """The bytes that replace the weights of groups, and how each was rounded. All ranks call.

        Raises InputError where a weight is not finite.
        """
        for moments in self._moments.values():
            moments.all_reduce()
        stored, how = dict[str, Array](), dict[str, GroupRounding]()
        for part, told in gather(self._rounded_here(model, groups)):
            stored |= part
            how |= told
        sites = self._inputs.sites
        names = [*self._inputs.unreachable, *(group.name for site in sites for group in site.groups)]
        return stored, tuple(how[name] for name in names)

    def _rounded_here(
        self, model: QuantizedModel, groups: Sequence[FusionGroup]
    ) -> tuple[Stored, Mapping[str, GroupRounding]]:
        """Those that this rank owns: sites are dealt in their order, and groups that no site has."""
        rank, size = rank_and_size()
        sites = {site.name: number % size for number, site in enumerate(self._inputs.sites)}
        owners = {group.name: sites[site.name] for site in self._inputs.sites for group in site.groups}
        own = {name: moments for name, moments in self._moments.items() if sites[name] == rank}
        made, how = round_sites(model, self._inputs, own, self._recipe_for)
        stored = dict[str, Array]()
        for number, group in enumerate(groups):
            if owners.get(group.name, number % size) == rank:
                rounded = made.pop(group.name, {})
                stored |= quantized_group(
                    group, model.index, model.calibration, model.reader, search=search_scales, rounded=rounded
                )
        return stored, how

    def _recipe_for(self, group: FusionGroup, site: Site) -> Recipe:
        """The recipe with a ridge that grows where fewer tokens than columns show the inputs of a refit."""
        recipe = recipe_of(group, site, self._recipe)
        if group.rounding != "refit":
            return recipe
        tokens = self._moments[site.name].tokens
        return replace(recipe, ridge=recipe.ridge * max(1.0, group.members[0].in_features / tokens))
