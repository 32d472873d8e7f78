"""What runs a module of experts and tells what went into each of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vexport.calibration.capture import Forward

# Told of an expert, of the input of its first layers (tokens, hidden size) and that of its down projection
# (tokens, intermediate size).
Saw = Callable[[int, torch.Tensor, torch.Tensor], None]


class Run(Protocol):
    """A forward of a module of experts: the module's output, to the bit, and how many tokens each got.

    `own` is the module's forward. With `all_tokens` what `saw` is told of comes from all tokens, else from
    those that are routed to the expert.
    """

    def __call__(
        self,
        module: torch.nn.Module,
        own: Forward,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        saw: Saw,
        *,
        all_tokens: bool,
    ) -> tuple[object, torch.Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """What enters a module of experts: all tokens (tokens, hidden size), in the order of the text, and for
    each expert which of them it gets and by how much its answer to each counts (routed, 1)."""

    tokens: torch.Tensor
    routes: tuple[torch.Tensor, ...]
    shares: tuple[torch.Tensor, ...]


class Arithmetic(Protocol):
    """What a module of experts computes, expert by expert: for what its own forward has no place for."""

    def enter(self, module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Entered:
        """What a call of the module's forward brings."""

    def between(self, module: torch.nn.Module, expert: int, tokens: torch.Tensor) -> torch.Tensor:
        """What enters an expert's down projection (tokens, intermediate size) of tokens (tokens, hidden)."""

    def down(self, module: torch.nn.Module, expert: int, between: torch.Tensor) -> torch.Tensor:
        """What its down projection makes of that, (tokens, hidden size)."""

    def leave(self, entered: Entered, answers: Sequence[torch.Tensor]) -> torch.Tensor:
        """The module's output of each expert's answers (routed, hidden size) to the tokens that it got."""
