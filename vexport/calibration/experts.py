"""The inputs of experts that transformers holds as three-dimensional parameters.

Its modules of experts (integrations/moe.py, `use_experts_implementation`) run all experts in a few grouped
products, so that no hook sees what enters one of them. Here the module's own forward is left as it is, and
what each expert's layers would see is computed beside it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from vexport.errors import InputError
from vexport.types import LinearPlan

# What says how the parameters of a module of experts are laid out.
LAYOUT = ("has_gate", "has_bias", "is_transposed", "down_proj")
See = Callable[[str, torch.Tensor], None]


class Experts(Protocol):
    """The part of transformers' modules of experts that is used here."""

    has_gate: bool
    has_bias: bool
    is_transposed: bool

    def get_parameter(self, target: str) -> torch.nn.Parameter: ...
    def _apply_gate(self, gate_up_out: torch.Tensor) -> torch.Tensor: ...
    def act_fn(self, input: torch.Tensor) -> torch.Tensor: ...


def require_experts(module: torch.nn.Module, name: str) -> None:
    """InputError for a module with stacked weights whose arithmetic is not that of transformers' experts."""
    if not all(hasattr(module, part) for part in LAYOUT):
        raise InputError(
            name,
            got=f"experts of the class {type(module).__name__}",
            need="experts that run by transformers' experts interface",
            fix="use a weight-only or dynamic scheme for the experts",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """The watched layers of a module of experts: for each expert those fed by the token (gate and up), and
    those fed by the activation between (down)."""

    name: str
    first: Sequence[Sequence[str]]
    second: Sequence[Sequence[str]]

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        stored: Mapping[str, Sequence[Sequence[str]]],
        layers: Mapping[str, Sequence[LinearPlan]],
    ) -> "ExpertLayers":
        """`stored` has the tensors of each stacked parameter: one for all experts, or one for each."""
        count = module.get_parameter("down_proj").shape[0]
        fed: dict[bool, list[list[str]]] = {
            True: [[] for _ in range(count)],
            False: [[] for _ in range(count)],
        }
        prefix = ""
        for parameter, parts in stored.items():
            for names in parts:
                for position, name in enumerate(names):
                    for layer in layers.get(name, ()):
                        expert = layer.part.expert if layer.part else position
                        fed[parameter == "down_proj"][expert].append(layer.name)
                        prefix = layer.name.rpartition(f".{expert}.")[0]
        return cls(name=prefix, first=fed[False], second=fed[True])

    @torch.no_grad()
    def observe(
        self,
        all_tokens: bool,
        routed: dict[str, torch.Tensor],
        see: See,
        module: torch.nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> None:
        """A forward pre-hook: show each expert's layers their inputs and count the tokens routed to it."""
        hidden, chosen, *_ = inspect.signature(module.forward).bind(*args, **kwargs).arguments.values()
        assert isinstance(hidden, torch.Tensor)
        assert isinstance(chosen, torch.Tensor)
        count = torch.bincount(chosen.flatten(), minlength=len(self.first)).cpu()
        routed[self.name] = routed.get(self.name, 0) + count
        for expert, (first, second) in enumerate(zip(self.first, self.second, strict=True)):
            tokens = hidden if all_tokens else hidden[(chosen == expert).any(-1)]
            for layer in first:
                see(layer, tokens)
            if second and tokens.numel():
                between = activation(cast(Experts, module), expert, tokens)
                for layer in second:
                    see(layer, between)


def activation(experts: Experts, expert: int, tokens: torch.Tensor) -> torch.Tensor:
    """What enters an expert's down projection, (tokens, intermediate size), for tokens (tokens, hidden)."""
    leaf = "gate_up_proj" if experts.has_gate else "up_proj"
    weight = experts.get_parameter(leaf)[expert]
    made = torch.nn.functional.linear(tokens, weight.T if experts.is_transposed else weight)
    if experts.has_bias:
        made += experts.get_parameter(f"{leaf}_bias")[expert]
    return experts._apply_gate(made) if experts.has_gate else experts.act_fn(made)
