"""What runs a module of experts and tells what went into each of them."""

from collections.abc import Callable, Mapping, Sequence
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
