"""Experts whose inputs are rounded, each as its scheme says: an arithmetic expert by expert stands in."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vexport.calibration.capture import Forward, replaced_forwards
from vexport.calibration.experts.kinds import arithmetic_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """A place in a module of experts: an expert's down projection, or what takes the tokens (gate and up)."""

    expert: int
    is_down: bool


# What rounds the inputs of a module.
Hook = Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


@contextmanager
def rounded_experts(module: torch.nn.Module, hooks: Mapping[ExpertLayer, Hook]) -> Iterator[None]:
    """Within the block experts round what these hooks round; those of unknown arithmetic nothing."""
    arithmetic = arithmetic_of(module)
    if arithmetic is None:
        yield
        return

    def rounded(value: torch.Tensor, expert: int, *, is_down: bool) -> torch.Tensor:
        hook = hooks.get(ExpertLayer(expert=expert, is_down=is_down))
        return value if hook is None or not len(value) else hook(module, (value,))[0]

    def forward(*args: object, **kwargs: object) -> torch.Tensor:
        entered, answers = arithmetic.enter(module, args, kwargs), []
        for expert, route in enumerate(entered.routes):
            tokens = rounded(entered.tokens[route], expert, is_down=False)
            between = rounded(arithmetic.between(module, expert, tokens), expert, is_down=True)
            answers.append(arithmetic.down(module, expert, between))
        return arithmetic.leave(entered, answers)

    def stub(number: int, own: Forward) -> Forward:
        return forward

    with replaced_forwards([module], stub):
        yield
