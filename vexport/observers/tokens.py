"""How many tokens observers saw: what calibration reports and what it refuses to ship without."""

from collections import Counter

import torch

from vexport.observers.flatten import STATES, WEIGHT

INPUT_OBSERVER = "input_observer"


def tokens_in(observed: torch.Tensor, base_name: str) -> int:
    """Tokens of an activation (..., hidden) or a state (batch, heads, tokens, size); 0 of a weight."""
    if base_name == WEIGHT or not observed.numel():
        return 0
    if base_name in STATES:
        return observed.shape[0] * observed.shape[2]
    return observed.numel() // observed.shape[-1]


def get_observer_token_count(module: torch.nn.Module) -> Counter[str]:
    """Tokens that each `input_observer` within `module` saw, by the name of the module that has it."""
    counts: Counter[str] = Counter()
    for name, submodule in module.named_modules():
        owner, _, last = name.rpartition(".")
        if last == INPUT_OBSERVER:
            counts[owner] = int(getattr(submodule, "tokens", 0))
    return counts
