"""What went into experts in one forward."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vexport.calibration.capture import Forward


@dataclass(frozen=True, slots=True)
class Sent:
    """How many tokens the router sent to each expert, and the inputs of each expert in turn.

    The inputs are those of its first layers, (tokens, hidden size), and of its down projection, (tokens,
    intermediate size); what the model itself did not compute is computed when it is asked for.
    """

    counts: torch.Tensor
    inputs: Iterator[tuple[torch.Tensor, torch.Tensor]]


class Run(Protocol):
    """A forward of a module of experts that tells what went in: the module's output, to the bit, and that.

    `own` is the module's forward. With `all_tokens` an expert's inputs come from all tokens, else from those
    that are routed to it.
    """

    def __call__(
        self,
        module: torch.nn.Module,
        own: Forward,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        all_tokens: bool,
    ) -> tuple[object, Sent]: ...
