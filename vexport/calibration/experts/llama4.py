"""Llama 4's experts: the router's weight scales what enters an expert, not what leaves it.

Source: Llama4TextMoe of transformers; vLLM does the same before it quantizes an expert's input
(`apply_router_weight_on_input`, fused_moe/prepare_finalize/no_dp_ep.py). The module gets all tokens once
for each expert, zeros where the token is not routed to it.
"""

from collections.abc import Mapping, Sequence

import torch

from vexport.calibration.capture import Forward
from vexport.calibration.experts.run import Entered, Saw


def serves(module: torch.nn.Module) -> bool:
    """Whether the module is one of them."""
    return type(module).__name__ == "Llama4TextExperts"


def run(
    module: torch.nn.Module,
    own: Forward,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    saw: Saw,
    *,
    all_tokens: bool,
) -> tuple[object, torch.Tensor]:
    """See `Run`. All tokens of an expert are scaled by the weight of the expert that they are routed to."""
    scaled = args[0] if args else kwargs["hidden_states"]
    assert isinstance(scaled, torch.Tensor)
    first, down = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
    tokens = scaled.view(len(first), -1, first.shape[1])
    between = activation(module, torch.bmm(tokens, first))
    output = torch.bmm(between, down).view(-1, tokens.shape[-1])
    routed = (tokens != 0).any(-1)
    everything = tokens[routed]
    for expert, (weight, here) in enumerate(zip(first, routed, strict=True)):
        if all_tokens:
            saw(expert, everything, activation(module, everything @ weight))
        else:
            saw(expert, tokens[expert, here], between[expert, here])
    return output, routed.sum(-1)


def activation(module: torch.nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
    """What enters down projections, (..., intermediate size), of what leaves gate and up together."""
    gate, up = gate_up.chunk(2, dim=-1)
    made: torch.Tensor = up * module.get_submodule("act_fn")(gate)
    return made


def enter(module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Entered:
    """See `Arithmetic`. A token comes scaled by its router's weight; where it is routed to several experts,
    by their sum."""
    scaled = args[0] if args else kwargs["hidden_states"]
    assert isinstance(scaled, torch.Tensor)
    tokens = scaled.view(len(module.get_parameter("down_proj")), -1, scaled.shape[-1])
    routes = tuple(own.any(-1).nonzero().squeeze(-1) for own in tokens != 0)
    shares = tuple(torch.ones_like(tokens[0, route, :1]) for route in routes)
    return Entered(tokens=tokens.sum(0), routes=routes, shares=shares)


def between(module: torch.nn.Module, expert: int, tokens: torch.Tensor) -> torch.Tensor:
    """See `Arithmetic`."""
    return activation(module, tokens @ module.get_parameter("gate_up_proj")[expert])


def down(module: torch.nn.Module, expert: int, between: torch.Tensor) -> torch.Tensor:
    """See `Arithmetic`."""
    return between @ module.get_parameter("down_proj")[expert]


def leave(entered: Entered, answers: Sequence[torch.Tensor]) -> torch.Tensor:
    """See `Arithmetic`: one row for every expert and token, zeros where the token is routed elsewhere."""
    output = entered.tokens.new_zeros(len(answers), *entered.tokens.shape)
    for expert, (route, answer) in enumerate(zip(entered.routes, answers, strict=True)):
        output[expert, route] = answer
    return output.flatten(0, 1)
