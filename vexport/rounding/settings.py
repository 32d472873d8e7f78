"""How weights are rounded, and the strengths of a refit that are tried."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to round: `strength` 0 is GPTQ. `ridge` is added to H as a share of its diagonal's mean."""

    strength: float
    ridge: float


# llm-compressor's damping.
GPTQ = Recipe(strength=0.0, ridge=0.01)
# A quarter of the refit: better than GPTQ and than a half for W4A16 on SmolLM2-135M.
REFIT = Recipe(strength=0.25, ridge=0.1)
# What is tried where there is text to choose by. The first keeps a refit from losing to GPTQ.
CANDIDATES = (GPTQ, REFIT, Recipe(strength=0.5, ridge=0.1))
# What a model of few layers is tried with in addition: errors of the correction add up layer after layer.
FULL = (Recipe(strength=1.0, ridge=0.1), Recipe(strength=1.0, ridge=0.01))
FEW_LAYERS = 8
# One row in so many is held out to choose by, none below.
HELD_OUT_ONE_IN = 8
# Where there is more text than so many tokens for each column of the widest input, strengths are tried on so
# much of it, with one row in so many held out; then all of it goes through the one that was chosen.
TRIAL_TOKENS_PER_COLUMN = 3
TRIAL_HELD_OUT_ONE_IN = 4
# Rows of the source's stream that are followed where only the report asks for them.
COMPARED_ROWS = 8


def trial_rows(rows: int, tokens: int, columns: int, held_out: int | None) -> tuple[int, int]:
    """On how many rows strengths are tried, and how many of them are held out.

    There are `rows` with `tokens` in all; `columns` are those of the widest input. `held_out` says how many
    to hold out, None as many as is usual.
    """
    fitted = math.ceil(TRIAL_TOKENS_PER_COLUMN * columns * rows / max(1, tokens))
    usual = max(1, fitted // (TRIAL_HELD_OUT_ONE_IN - 1))
    tried = fitted + (usual if held_out is None else held_out)
    if tried < rows and held_out != 0:
        return tried, tried - fitted
    return rows, rows // HELD_OUT_ONE_IN if held_out is None else held_out
