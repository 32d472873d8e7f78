"""Which forward stands in for that of a module of experts; a new kind is one file and one line here."""

from collections.abc import Callable, Sequence

import torch

from vexport.calibration.experts import grouped, llama4
from vexport.calibration.experts.run import Run
from vexport.errors import InputError

# Whether a module is of the kind, and its forward that tells.
KINDS: Sequence[tuple[Callable[[torch.nn.Module], bool], Run]] = (
    (grouped.serves, grouped.run),
    (llama4.serves, llama4.run),
)


def runner_of(module: torch.nn.Module, name: str) -> Run:
    """The forward for a module with stacked weights; InputError where its arithmetic is not known."""
    for serves, run in KINDS:
        if serves(module):
            return run
    raise InputError(
        name,
        got=f"experts of the class {type(module).__name__}",
        need="experts that run by transformers' experts interface, or Llama 4's",
        fix="use a weight-only or dynamic scheme for the experts",
    )
