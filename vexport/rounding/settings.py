"""The strength of a refit, and the most text that can be rounded by at once."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vexport.errors import InputError
from vexport.formats.arguments import input_bits
from vexport.formats.schemes import get_scheme
from vexport.records import FusionGroup

CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
WAITING_BYTES = 2
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strength:
    """One way to round: `strength` 0 is GPTQ. `ridge` is added to H as a share of its diagonal's mean.

    `weighs_tokens` says whether tokens count by the gradient behind them, or all the same.
    """

    strength: float
    ridge: float
    weighs_tokens: bool = False


# llm-compressor's damping.
GPTQ = Strength(strength=0.0, ridge=0.01)
# The strength of a refit by the bits of inputs, what left least KL on SmolLM2-135M (docs/results.md).
REFITS = {
    16: Strength(strength=0.5, ridge=0.1, weighs_tokens=True),
    8: Strength(strength=0.5, ridge=0.1, weighs_tokens=True),
    4: Strength(strength=0.25, ridge=0.3),
}


def strength_of(group: FusionGroup) -> Strength:
    """The strength of a group: by its rule, else by the table above."""
    if group.rounding != "refit":
        return GPTQ
    settings = REFITS[input_bits(get_scheme(group.scheme).args)]
    if group.strength is not None:
        settings = replace(settings, strength=group.strength)
    return settings if group.ridge is None else replace(settings, ridge=group.ridge)


def weighs_tokens(groups: Iterable[FusionGroup]) -> bool:
    """True where the weights of tokens have to be found for these groups."""
    return any(strength_of(group).weighs_tokens for group in groups if group.rounding != "nearest")


def most_waiting(device: str = "cpu") -> int:
    """The most bytes for rows that wait in a layer: half of the GPU's, or else of this process's memory."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory // 2
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such group, or one without a limit
        memory = min(memory, int(CGROUP_MEMORY.read_text(encoding="ascii")))
    return memory // 2


def waiting_bytes(groups: Iterable[FusionGroup], tokens: int) -> int:
    """The bytes of rows of so many tokens in all that wait in front of a layer's widest input, 16-bit.

    A row has what enters the widest and that as it is rounded, of the others about as much as they take, and
    as much again is lost between; a refit keeps what enters the widest in the source's stream, too.
    """
    rounded = [group for group in groups if group.rounding != "nearest"]
    columns = {NUMBER.sub("*", group.name): group.members[0].in_features for group in rounded}
    refits = any(strength_of(group).strength > 0 for group in rounded)
    widest = max(columns.values(), default=0)
    return tokens * (sum(columns.values()) + (3 if refits else 2) * widest) * WAITING_BYTES


def require_room(groups: Iterable[FusionGroup], tokens: int, samples: int, device: str) -> None:
    """InputError where so many samples of text that wait in a layer take more memory than there is."""
    needed, most = waiting_bytes(groups, tokens), most_waiting(device)
    if needed > most:
        fitting = samples * most // needed
        raise InputError(
            "calibration",
            got=f"{samples} samples of {tokens:,} tokens, which take {needed / 1e9:.1f} GB while rounding",
            need=f"at most {most / 1e9:.1f} GB, half of the memory",
            fix=f"use --samples {fitting}" if fitting else "use shorter samples (seq_len in a scenario)",
        )
