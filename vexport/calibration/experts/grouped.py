"""Experts that run by transformers' experts interface (integrations/moe.py, `use_experts_implementation`)."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from transformers.integrations.moe import grouped_mm_experts_forward

from vexport.calibration.capture import Forward
from vexport.calibration.experts.run import Entered, Saw

# What says how the parameters of a module of experts are laid out.
LAYOUT = ("has_gate", "has_bias", "is_transposed", "down_proj")


class Experts(Protocol):
    """The part of transformers' modules of experts that is used here."""

    has_gate: bool
    has_bias: bool
    is_transposed: bool

    def get_parameter(self, target: str) -> torch.nn.Parameter: ...
    def _apply_gate(self, gate_up_out: torch.Tensor) -> torch.Tensor: ...
    def act_fn(self, input: torch.Tensor) -> torch.Tensor: ...


def serves(module: torch.nn.Module) -> bool:
    """Whether the module has the interface's layout."""
    return all(hasattr(module, part) for part in LAYOUT)


def run(
    module: torch.nn.Module,
    own: Forward,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    saw: Saw,
    *,
    all_tokens: bool,
) -> tuple[object, torch.Tensor]:
    """See `Run`. No product is made twice."""
    hidden, chosen, weights = inspect.signature(own).bind(*args, **kwargs).arguments.values()
    assert isinstance(hidden, torch.Tensor)
    assert isinstance(chosen, torch.Tensor)
    assert isinstance(weights, torch.Tensor)
    counts = torch.bincount(chosen.flatten(), minlength=module.get_parameter("down_proj").shape[0])
    if all_tokens:
        return _run_all(cast(Experts, module), hidden, chosen, weights, saw), counts
    with _activation(module) as made:
        output = grouped_mm_experts_forward(module, hidden, chosen, weights)
    order = chosen.flatten().argsort(stable=True) // chosen.shape[-1]
    parts = counts.tolist()
    inputs = zip(torch.split(hidden[order], parts), torch.split(made[0], parts), strict=True)
    for expert, (tokens, between) in enumerate(inputs):
        saw(expert, tokens, between)
    return output, counts


def _run_all(
    module: Experts, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, saw: Saw
) -> torch.Tensor:
    """The arithmetic of `grouped_mm_experts_forward`, expert by expert: first layers take all tokens, down
    projections those that are routed to them."""
    routes, shares = chosen.flatten(), weights.flatten().unsqueeze(-1)
    dtype = torch.promote_types(hidden.dtype, weights.dtype)
    parts = torch.empty(len(routes), hidden.shape[-1], dtype=dtype, device=hidden.device)
    for expert in range(len(module.get_parameter("down_proj"))):
        made = activation(module, expert, hidden)
        saw(expert, hidden, made)
        here = (routes == expert).nonzero().squeeze(-1)
        sent = made[here // chosen.shape[-1]]
        parts[here] = _product(module, "down_proj", expert, sent) * shares[here]
    return parts.view(*chosen.shape, -1).sum(1).to(hidden.dtype)


@contextmanager
def _activation(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Within the block what the module's activation returns is appended to what is yielded."""
    made: list[torch.Tensor] = []
    experts = cast(Experts, module)
    if not experts.has_gate:
        act_fn = module.get_submodule("act_fn")
        handle = act_fn.register_forward_hook(lambda _module, _inputs, output: made.append(output))
        try:
            yield made
        finally:
            handle.remove()
        return
    apply = experts._apply_gate

    def kept(gate_up_out: torch.Tensor) -> torch.Tensor:
        made.append(apply(gate_up_out))
        return made[-1]

    experts._apply_gate = kept  # type: ignore[method-assign]
    try:
        yield made
    finally:
        del experts._apply_gate


def activation(experts: Experts, expert: int, tokens: torch.Tensor) -> torch.Tensor:
    """What enters an expert's down projection, (tokens, intermediate size), for tokens (tokens, hidden)."""
    made = _product(experts, "gate_up_proj" if experts.has_gate else "up_proj", expert, tokens)
    return experts._apply_gate(made) if experts.has_gate else experts.act_fn(made)


def _product(experts: Experts, parameter: str, expert: int, tokens: torch.Tensor) -> torch.Tensor:
    """What a layer of an expert makes of tokens."""
    weight = experts.get_parameter(parameter)[expert]
    made = torch.nn.functional.linear(tokens, weight.T if experts.is_transposed else weight)
    if experts.has_bias:
        made += experts.get_parameter(f"{parameter}_bias")[expert]
    return made


def enter(module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Entered:
    """See `Arithmetic`."""
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments.values()
    _, hidden, chosen, weights = given
    assert isinstance(hidden, torch.Tensor)
    assert isinstance(chosen, torch.Tensor)
    assert isinstance(weights, torch.Tensor)
    here = [(chosen == expert).nonzero() for expert in range(len(module.get_parameter("down_proj")))]
    return Entered(
        tokens=hidden,
        routes=tuple(found[:, 0] for found in here),
        shares=tuple(weights[found[:, 0], found[:, 1]].unsqueeze(-1) for found in here),
    )


def between(module: torch.nn.Module, expert: int, tokens: torch.Tensor) -> torch.Tensor:
    """See `Arithmetic`."""
    return activation(cast(Experts, module), expert, tokens)


def down(module: torch.nn.Module, expert: int, between: torch.Tensor) -> torch.Tensor:
    """See `Arithmetic`."""
    return _product(cast(Experts, module), "down_proj", expert, between)


def leave(entered: Entered, answers: Sequence[torch.Tensor]) -> torch.Tensor:
    """See `Arithmetic`: the answers to a token are added up in the order of the experts, in float32."""
    total = torch.zeros_like(entered.tokens, dtype=torch.float32)
    for route, share, answer in zip(entered.routes, entered.shares, answers, strict=True):
        total.index_add_(0, route, (answer * share).to(torch.float32))
    return total.to(entered.tokens.dtype)
