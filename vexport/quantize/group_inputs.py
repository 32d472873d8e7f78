"""What enters the layers of fusion groups: noted in a stream, added up for the groups that share it.

Linear modules show it to a hook. A module of experts has one forward for all of them: noted is what enters
the module, and what enters each expert's layers is computed from it. Gate and up of all experts take the
same tokens, all of the text's, so that they share one H. An expert's down projection has its own, of what it
makes of the tokens that are routed to it, and, where those are few, of what it makes of all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass

import torch

from vexport.architectures.fusion import moe_layer
from vexport.calibration.experts.kinds import arithmetic_of
from vexport.calibration.experts.run import Entered
from vexport.calibration.token_weights import EQUAL, TokenWeights
from vexport.quantize.applied import QuantizedModel
from vexport.rounding.moments import Moments
from vexport.types import FusionGroup, LinearPlan

# What enters a module: of experts what their forward is called with.
Value = torch.Tensor | Entered
# That by the module's name in the model.
Noted = Mapping[str, Value]
# Of the tokens of the text so many a column count as one that is routed to an expert, together.
SHARED_TOKENS_PER_COLUMN = 1.0


class _AllNoted(Exception):
    """Ends a forward of which all inputs have been seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """An input (..., columns) that groups share: of the module `module`, there of all experts or of one.

    `expert` is None for a linear module and for what all experts take. `is_aligned` says whether both streams
    bring the same tokens in the same order: not where a router in front of the module chooses them.
    """

    name: str
    module: str
    columns: int
    groups: tuple[FusionGroup, ...]
    expert: int | None = None
    is_aligned: bool = True


class GroupInputs:
    """The inputs of groups in a model, and why some groups have none that can be noted."""

    def __init__(
        self,
        model: QuantizedModel,
        groups: Sequence[FusionGroup],
        token_weights: TokenWeights = EQUAL,
    ) -> None:
        self._model = model
        self._token_weights = token_weights
        # The modules that an input enters, all to be shown the same one.
        self._modules: dict[str, list[torch.nn.Module]] = {}
        # The names of all that a module's input enters, those of token weights.
        self._names: dict[str, set[str]] = {}
        # What takes the tokens of an expert, by module and expert.
        self._firsts: dict[tuple[str, int], FusionGroup] = {}
        self.unreachable: dict[str, str] = {}
        found: dict[tuple[str, int | None, int], list[FusionGroup]] = {}
        for group in groups:
            place = self._place(group)
            if isinstance(place, str):
                self.unreachable[group.name] = place
            else:
                found.setdefault((*place, group.members[0].in_features), []).append(group)
                names = {self._module_of(member) for member in group.members}
                self._names.setdefault(place[0], set()).update(names)
        self.sites = tuple(
            Site(
                name=shared[0].name,
                module=module,
                columns=columns,
                groups=tuple(shared),
                expert=expert,
                is_aligned=self._is_experts(module) or moe_layer(shared[0].members[0].name) is None,
            )
            for (module, expert, columns), shared in found.items()
        )

    def _place(self, group: FusionGroup) -> tuple[str, int | None] | str:
        """The module and expert that a group's input belongs to, or why it cannot be noted."""
        member = group.members[0]
        name = self._module_of(member)
        linears = [self._model.linear(one) for one in group.members]
        if linears[0] is not None and None not in linears:
            self._modules[name] = [linear for linear in linears if linear is not None]
            return name, None
        found = self._model.expert(member)
        if found is None:
            return "the model runs no linear module with its weight"
        module, layer = found
        if arithmetic_of(module) is None:
            return f"the arithmetic of {type(module).__name__} is not known"
        self._modules[name] = [module]
        if not layer.is_down:
            self._firsts[name, layer.expert] = group
        return name, layer.expert if layer.is_down else None

    def _module_of(self, member: LinearPlan) -> str:
        """The name of the module that has a member's weight."""
        return self._model.parameter_of(member).rpartition(".")[0]

    def _is_experts(self, module: str) -> bool:
        return arithmetic_of(self._modules[module][0]) is not None

    @property
    def modules(self) -> list[str]:
        """The names of the modules that inputs enter, in the model's order."""
        return sorted(self._modules, key=self._model.place_of)

    def only(self, module: str | None) -> "GroupInputs":
        """Those of the groups whose input enters this module; None: of the groups that have none."""
        part = copy(self)
        part.sites = tuple(site for site in self.sites if site.module == module)
        part.unreachable = {} if module else self.unreachable
        return part

    @contextmanager
    def shown(self, show: Callable[[str, Value], None]) -> Iterator[None]:
        """Within the block `show` gets the names of modules and what enters them, before that is rounded."""
        with ExitStack() as block:
            for name, modules in self._modules.items():
                for module in modules:
                    hook = _showing(name, module, show)
                    handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                    block.callback(handle.remove)
            yield

    @contextmanager
    def noted(self, *, only: bool = False) -> Iterator[dict[str, Value]]:
        """Within the block the inputs of a forward are noted, before anything rounds them.

        With `only` the block ends where all are, its forward's answer being of no use.
        """
        seen: dict[str, Value] = {}

        def note(name: str, value: Value) -> None:
            seen[name] = value
            if only and len(seen) == len(self._modules):
                raise _AllNoted

        with suppress(_AllNoted), self.shown(note):
            yield seen

    def add(
        self,
        site: Site,
        moments: Moments,
        quantized: Noted,
        source: Noted,
        *,
        text: int,
        weighs_tokens: bool = False,
    ) -> None:
        """Take in one batch of both streams; `text` is how many tokens all batches have.

        With `weighs_tokens` they count by what is known of them. What does not reach the module of a site
        changes nothing. The model's weights must be the source's.
        """
        here, exact = quantized.get(site.module), source.get(site.module)
        if here is None:
            return
        tokens = here.tokens if isinstance(here, Entered) else here
        weights = self._weights(site, tokens) if weighs_tokens else None
        if isinstance(here, Entered):
            assert exact is None or isinstance(exact, Entered)
            wanted = None if exact is None else exact.tokens
            if site.expert is None:
                moments.add(self._model.rounded_input(site.groups[0], tokens), wanted, weights=weights)
            else:
                self._add_down(site, moments, here, wanted, weights, text)
        else:
            assert not isinstance(exact, Entered)
            moments.add(self._model.rounded_input(site.groups[0], tokens), exact, weights=weights)

    def _weights(self, site: Site, tokens: torch.Tensor) -> torch.Tensor | None:
        """By how much each of a row's tokens counts; None where nothing is known of it."""
        names = sorted(self._names[site.module])
        found = self._token_weights.of(names, tokens.numel() // tokens.shape[-1])
        return None if found is None else found.to(tokens.device)

    def _add_down(
        self,
        site: Site,
        moments: Moments,
        here: Entered,
        exact: torch.Tensor | None,
        weights: torch.Tensor | None,
        text: int,
    ) -> None:
        """An expert's own tokens, and all of the text, together as `SHARED_TOKENS_PER_COLUMN` a column."""
        (module,), expert, group = self._modules[site.module], site.expert, site.groups[0]
        arithmetic = arithmetic_of(module)
        assert arithmetic is not None
        assert expert is not None
        first = self._firsts.get((site.module, expert))
        tokens = here.tokens if first is None else self._model.rounded_input(first, here.tokens)
        between = self._model.rounded_input(group, arithmetic.between(module, expert, tokens))
        wanted = None
        if moments.cross is not None:
            assert exact is not None
            wanted = arithmetic.between(module, expert, exact)
        route = here.routes[expert]
        moments.add(
            between[route],
            None if wanted is None else wanted[route],
            weights=None if weights is None else weights[route],
        )
        share = min(1.0, SHARED_TOKENS_PER_COLUMN * site.columns / max(1, text))
        moments.add(between, wanted, weights=weights, share=share)


def _showing(name: str, module: torch.nn.Module, show: Callable[[str, Value], None]) -> Callable[..., None]:
    arithmetic = arithmetic_of(module)

    def hook(_: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, object]) -> None:
        show(name, args[0] if arithmetic is None else arithmetic.enter(module, args, kwargs))

    return hook
