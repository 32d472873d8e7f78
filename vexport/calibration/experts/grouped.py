"""Experts that run by transformers' experts interface (integrations/moe.py, `use_experts_implementation`)."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from transformers.integrations.moe import grouped_mm_experts_forward

from vexport.calibration.capture import Forward
from vexport.calibration.experts.sent import Sent

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
    all_tokens: bool,
) -> tuple[object, Sent]:
    """See `Run`. Inputs of routed tokens are those of the model's own grouped products; nothing is
    computed twice."""
    hidden, chosen, weights = inspect.signature(own).bind(*args, **kwargs).arguments.values()
    assert isinstance(hidden, torch.Tensor)
    assert isinstance(chosen, torch.Tensor)
    experts = module.get_parameter("down_proj").shape[0]
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    if all_tokens:
        return own(hidden, chosen, weights), Sent(counts, _of_all(cast(Experts, module), hidden, experts))
    with _activation(module) as made:
        output = grouped_mm_experts_forward(module, hidden, chosen, weights)
    order = chosen.flatten().argsort(stable=True) // chosen.shape[-1]
    parts = counts.tolist()
    return output, Sent(
        counts, zip(torch.split(hidden[order], parts), torch.split(made[0], parts), strict=True)
    )


def _of_all(
    module: Experts, tokens: torch.Tensor, experts: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return ((tokens, activation(module, expert, tokens)) for expert in range(experts))


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
    leaf = "gate_up_proj" if experts.has_gate else "up_proj"
    weight = experts.get_parameter(leaf)[expert]
    made = torch.nn.functional.linear(tokens, weight.T if experts.is_transposed else weight)
    if experts.has_bias:
        made += experts.get_parameter(f"{leaf}_bias")[expert]
    return experts._apply_gate(made) if experts.has_gate else experts.act_fn(made)
