"""Which forward stands in for that of a module of experts; a new kind is one file and one line here."""

from collections.abc import Callable, Sequence

import torch

from vexport.calibration.experts import grouped, llama4
from vexport.calibration.experts.run import Arithmetic, Run
from vexport.errors import InputError

# Whether a module is of the kind, its forward that tells, and its arithmetic expert by expert.
KINDS: Sequence[tuple[Callable[[torch.nn.Module], bool], Run, Arithmetic]] = (
    (grouped.serves, grouped.run, grouped),
    (llama4.serves, llama4.run, llama4),
)


def runner_of(module: torch.nn.Module, name: str) -> Run:
    """The forward for a module with stacked weights; InputError where its arithmetic is not known."""
    for serves, run, _ in KINDS:
        if serves(module):
            return run
    raise InputError(
        name,
        got=f"experts of the class {type(module).__name__}",
        need="experts that run by transformers' experts interface, or Llama 4's",
        fix="use a weight-only or dynamic scheme for the experts",
    )


def arithmetic_of(module: torch.nn.Module) -> Arithmetic | None:
    """What a module with stacked weights computes; None where that is not known."""
    return next((arithmetic for serves, _, arithmetic in KINDS if serves(module)), None)
