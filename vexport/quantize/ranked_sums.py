"""Second moments of a layer's inputs over torchrun's ranks: rows of text are dealt, each sum has one owner.

A row runs through both streams on one rank. What enters the layers of a site goes to the site's owner, who
adds up the rows in the order of the text: the same sums as in one process, to the bit, and each matrix is in
the memory of one rank alone. Not sums but inputs travel, tokens * columns values of each row and stream: sums
that are the same for any number of ranks would have to be cut into parts that one process holds too.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

import torch
from torch import distributed

from vexport.calibration.experts.run import Entered
from vexport.calibration.ranks import rank_and_size
from vexport.quantize.group_inputs import GroupInputs, Noted, Site
from vexport.quantize.round_sites import zero_moments
from vexport.rounding.settings import Recipe
from vexport.types import FusionGroup

# The recipe of a group with this input, in the branch of this number.
RecipeOf = Callable[[int, FusionGroup, Site], Recipe]


def owners(costs: Mapping[tuple[int, str], int]) -> Mapping[tuple[int, str], int]:
    """The rank of each, the largest first to the one with least to do; the same on all ranks."""
    loads = [0] * rank_and_size()[1]
    found: dict[tuple[int, str], int] = {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        found[name] = loads.index(min(loads))
        loads[found[name]] += costs[name]
    return found


class RankedSums:
    """The moments of a layer's sites in some branches, of which each rank adds up its own."""

    def __init__(
        self, inputs: GroupInputs, branches: Sequence[int], recipe_of: RecipeOf, *, text: int, device: str
    ) -> None:
        self._inputs, self._recipe_of, self._text, self._device = inputs, recipe_of, text, device
        self.owners = owners(
            {
                (branch, site.name): site.columns**2 * (text + sum(map(_rows, site.groups)))
                for branch in branches
                for site in inputs.sites
            }
        )
        self._weighed = {
            (branch, site.name)
            for branch in branches
            for site in inputs.sites
            if all(recipe_of(branch, group, site).weighs_tokens for group in site.groups)
        }
        rank, _ = rank_and_size()
        self.own = {
            branch: zero_moments(self._sites(branch, rank), partial(recipe_of, branch), device)
            for branch in branches
        }
        self._exact: Sequence[Noted | None] = ()

    def _sites(self, branch: int, rank: int) -> list[Site]:
        return [site for site in self._inputs.sites if self.owners[branch, site.name] == rank]

    def note_source(self, noted: Noted | None) -> None:
        """What entered in the source's stream, of this rank's row; None where it has none. All ranks call."""
        wanted = [
            {
                site.module
                for branch in self.own
                for site in self._sites(branch, rank)
                if any(self._recipe_of(branch, group, site).strength for group in site.groups)
            }
            for rank in range(rank_and_size()[1])
        ]
        self._exact = self._dealt(noted, wanted)

    def add(self, branch: int, noted: Noted | None) -> None:
        """Take in what entered in a branch's stream, after that of the source. All ranks call."""
        rank, size = rank_and_size()
        wanted = [{site.module for site in self._sites(branch, other)} for other in range(size)]
        for seen, exact in zip(self._dealt(noted, wanted), self._exact, strict=True):
            for site in self._sites(branch, rank) if seen is not None else ():
                assert seen is not None
                weighs = (branch, site.name) in self._weighed
                sums = self.own[branch][site.name]
                self._inputs.add(site, sums, seen, exact or {}, text=self._text, weighs_tokens=weighs)

    def _dealt(self, noted: Noted | None, wanted: Sequence[Set[str]]) -> list[Noted | None]:
        """What each rank noted of the modules that this rank wants, in the order of the ranks."""
        rank, size = rank_and_size()
        found: list[Noted | None] = [noted] * size
        for source in range(size):
            for target in range(size):
                if source == target or not wanted[target]:
                    continue
                if rank == source:
                    distributed.send_object_list([_only(noted, wanted[target])], dst=target)
                elif rank == target:
                    box: list[Noted | None] = [None]
                    distributed.recv_object_list(box, src=source)
                    found[source] = _on(self._device, box[0])
        return found


def _rows(group: FusionGroup) -> int:
    return sum(member.out_features for member in group.members)


def _only(noted: Noted | None, modules: Set[str]) -> Noted | None:
    """What was noted of some modules, each value alone in its memory."""
    if noted is None:
        return None
    return {name: _moved(value, _packed) for name, value in noted.items() if name in modules}


def _packed(value: torch.Tensor) -> torch.Tensor:
    return value.to("cpu", copy=True)


def _on(device: str, noted: Noted | None) -> Noted | None:
    if noted is None:
        return None
    return {name: _moved(value, lambda tensor: tensor.to(device)) for name, value in noted.items()}


def _moved(
    value: torch.Tensor | Entered, move: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | Entered:
    if isinstance(value, torch.Tensor):
        return move(value)
    routes, shares = (tuple(map(move, parts)) for parts in (value.routes, value.shares))
    return replace(value, tokens=move(value.tokens), routes=routes, shares=shares)
