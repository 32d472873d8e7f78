"""The computation of modules of experts, which hold the weights of all in three-dimensional parameters.

A new kind of experts is one class like `Arithmetic` and one entry in KINDS.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

# What says how the parameters of a module of experts of transformers' interface are laid out.
LAYOUT = ("has_gate", "has_bias", "is_transposed", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """The input of a module of experts: all tokens (tokens, hidden size), in the order of the text, and for
    each expert which of them it gets and by how much its answer to each counts (routed, 1)."""

    tokens: torch.Tensor
    routes: tuple[torch.Tensor, ...]
    shares: tuple[torch.Tensor, ...]


class Arithmetic:
    """The computation of a module of experts, expert by expert, with room between its products.

    These are the experts that run by transformers' experts interface (integrations/moe.py).
    """

    def serves(self, module: torch.nn.Module) -> bool:
        """True for a module of this kind."""
        return all(hasattr(module, part) for part in LAYOUT)

    def enter(self, module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Entered:
        """The tokens and routes in a call of the module's forward."""
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments.values()
        _, hidden, chosen, weights = given
        assert isinstance(hidden, torch.Tensor)
        assert isinstance(chosen, torch.Tensor)
        assert isinstance(weights, torch.Tensor)
        # The places of (tokens, chosen) by expert: the host waits for the counts alone.
        experts, places = len(module.get_parameter("down_proj")), chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=experts).tolist()
        routes, shares = places // chosen.shape[-1], weights.flatten()[places].unsqueeze(-1)
        return Entered(tokens=hidden, routes=torch.split(routes, counts), shares=torch.split(shares, counts))

    def between(self, module: torch.nn.Module, expert: int, tokens: torch.Tensor) -> torch.Tensor:
        """The input (tokens, intermediate size) of an expert's down projection."""
        experts = cast(Experts, module)
        made = self._product(experts, "gate_up_proj" if experts.has_gate else "up_proj", expert, tokens)
        return experts._apply_gate(made) if experts.has_gate else experts.act_fn(made)

    def down(self, module: torch.nn.Module, expert: int, between: torch.Tensor) -> torch.Tensor:
        """The output (tokens, hidden size) of its down projection."""
        return self._product(cast(Experts, module), "down_proj", expert, between)

    def leave(self, entered: Entered, answers: Sequence[torch.Tensor]) -> torch.Tensor:
        """The module's output of each expert's answers (routed, hidden size) to the tokens that it got.

        The answers to a token are added up in the order of the experts, in float32.
        """
        total = torch.zeros_like(entered.tokens, dtype=torch.float32)
        for route, share, answer in zip(entered.routes, entered.shares, answers, strict=True):
            total.index_add_(0, route, (answer * share).to(torch.float32))
        return total.to(entered.tokens.dtype)

    def _product(self, experts: "Experts", parameter: str, expert: int, tokens: torch.Tensor) -> torch.Tensor:
        weight = experts.get_parameter(parameter)[expert]
        made = torch.nn.functional.linear(tokens, weight.T if experts.is_transposed else weight)
        if experts.has_bias:
            made += experts.get_parameter(f"{parameter}_bias")[expert]
        return made


class Experts(Protocol):
    """The part of transformers' modules of experts that is used here."""

    has_gate: bool
    has_bias: bool
    is_transposed: bool

    def get_parameter(self, target: str) -> torch.nn.Parameter: ...
    def _apply_gate(self, gate_up_out: torch.Tensor) -> torch.Tensor: ...
    def act_fn(self, input: torch.Tensor) -> torch.Tensor: ...


class Llama4(Arithmetic):
    """Llama 4's experts: the router's weight scales what enters an expert, not what leaves it.

    Source: Llama4TextMoe of transformers; vLLM does the same before it quantizes an expert's input
    (`apply_router_weight_on_input`, fused_moe/prepare_finalize/no_dp_ep.py). The module gets all tokens once
    for each expert, zeros where the token is not routed to it, and returns as many. A token comes scaled by
    its router's weight; where it is routed to several experts, by their sum.
    """

    def serves(self, module: torch.nn.Module) -> bool:
        return type(module).__name__ == "Llama4TextExperts"

    def enter(self, module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Entered:
        scaled = args[0] if args else kwargs["hidden_states"]
        assert isinstance(scaled, torch.Tensor)
        tokens = scaled.view(len(module.get_parameter("down_proj")), -1, scaled.shape[-1])
        is_routed = (tokens != 0).any(-1)
        routes = torch.split(is_routed.nonzero()[:, 1], is_routed.sum(-1).tolist())
        shares = tuple(torch.ones_like(tokens[0, route, :1]) for route in routes)
        return Entered(tokens=tokens.sum(0), routes=routes, shares=shares)

    def between(self, module: torch.nn.Module, expert: int, tokens: torch.Tensor) -> torch.Tensor:
        gate, up = (tokens @ module.get_parameter("gate_up_proj")[expert]).chunk(2, dim=-1)
        made: torch.Tensor = up * module.get_submodule("act_fn")(gate)
        return made

    def down(self, module: torch.nn.Module, expert: int, between: torch.Tensor) -> torch.Tensor:
        return between @ module.get_parameter("down_proj")[expert]

    def leave(self, entered: Entered, answers: Sequence[torch.Tensor]) -> torch.Tensor:
        output = entered.tokens.new_zeros(len(answers), *entered.tokens.shape)
        for expert, (route, answer) in enumerate(zip(entered.routes, answers, strict=True)):
            output[expert, route] = answer
        return output.flatten(0, 1)


KINDS: Sequence[Arithmetic] = (Arithmetic(), Llama4())


def arithmetic_of(module: torch.nn.Module) -> Arithmetic | None:
    """The arithmetic of a module with stacked weights; None where it is not known."""
    return next((kind for kind in KINDS if kind.serves(module)), None)
