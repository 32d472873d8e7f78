"""How weights are rounded, and the strengths of a refit that are tried."""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to round: `strength` 0 is GPTQ. `ridge` is added to H as a share of its diagonal's mean.

    `weighs_tokens` says whether tokens count by the gradient behind them, or all the same.
    """

    strength: float
    ridge: float
    weighs_tokens: bool = False


# llm-compressor's damping.
GPTQ = Recipe(strength=0.0, ridge=0.01)
# A quarter of the refit: better than GPTQ in every scheme on SmolLM2-135M.
REFIT = Recipe(strength=0.25, ridge=0.1)
# What is tried where there is text to choose by. The first keeps a refit from losing to GPTQ; weights of
# tokens are best for weights alone on SmolLM2-135M, and harm a refit where inputs have 4 bits.
CANDIDATES = (GPTQ, REFIT, Recipe(strength=0.5, ridge=0.1, weighs_tokens=True))
# What a deep model is tried with in addition.
DEEP = (Recipe(strength=0.25, ridge=0.1, weighs_tokens=True),)
# What a model of few layers is tried with in addition: errors of the correction add up layer after layer.
FULL = (
    Recipe(strength=0.5, ridge=0.03),
    Recipe(strength=0.75, ridge=0.01),
    Recipe(strength=1.0, ridge=0.01),
)
FEW_LAYERS = 8
# Strengths are tried on so many tokens, at least so many for each column of the widest input, with one row in
# so many held out to choose by. All of the text then goes through the one that was chosen.
TRIAL_TOKENS, TRIAL_TOKENS_PER_COLUMN = 6144, 3
HELD_OUT_ONE_IN = 4
# Of less text than that, one row in so many is held out; none where there are fewer rows.
HELD_OUT_OF_LITTLE = 8
# Rows, spread over the text, that show how much tokens count, and how many times the work of one row each is:
# twice forward, and back.
WEIGHING_ROWS, WEIGHING_PASSES = 4, 3
# Rows of the source's stream that are followed where only the report asks for them.
COMPARED_ROWS = 4
# Rows wait in a decoder layer until the weights in front of them are rounded, if all of the text takes no
# more than this, nor more than half of the machine's memory: then each runs through it once. Else all run
# through it twice, before and after it is rounded; those that strengths are tried on, too, since which one is
# best depends on it.
MOST_WAITING = 20 * 2**30
WAITING_BYTES = 2
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


def refit_recipes(layers: int, held_out: int) -> tuple[Recipe, ...]:
    """Strengths from none on, more of it for few layers; a quarter where there is nothing to choose by."""
    if not held_out:
        return (REFIT,)
    return (*CANDIDATES, *(FULL if layers <= FEW_LAYERS else DEEP))


def most_waiting() -> int:
    """How many bytes rows may take that wait in a layer on this machine."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such group, or one without a limit
        memory = min(memory, int(CGROUP_MEMORY.read_text(encoding="ascii")))
    return min(MOST_WAITING, memory // 2)


def waiting_bytes(columns: Sequence[int], tokens: int, *, refits: bool) -> int:
    """What rows of so many tokens in all take that wait in front of the widest of a layer's inputs, 16-bit.

    `columns` are those of each input. A row has what enters the widest and that as it is rounded, of the
    others about as much as they take, and as much again is lost between; a refit keeps what enters the
    widest in the source's stream, too.
    """
    widest = max(columns, default=0)
    return tokens * (sum(columns) + (3 if refits else 2) * widest) * WAITING_BYTES


def trial_rows(rows: int, tokens: int, columns: int, held_out: int | None) -> tuple[int, int]:
    """On how many rows strengths are tried, and how many of them are held out.

    There are `rows` with `tokens` in all; `columns` are those of the widest input. `held_out` says how many
    to hold out, None as many as is usual.
    """
    wanted = max(TRIAL_TOKENS, TRIAL_TOKENS_PER_COLUMN * columns)
    fitted = math.ceil(wanted * rows / max(1, tokens))
    if held_out is None:
        held_out = max(1, fitted // (HELD_OUT_ONE_IN - 1))
        if fitted + held_out > rows:
            held_out = rows // HELD_OUT_OF_LITTLE
    return min(rows, fitted + held_out), held_out
