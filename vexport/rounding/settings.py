"""How weights are rounded, and the strengths of a refit that are tried."""

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
# What is tried where there is text to choose by. The first two keep a refit from losing to GPTQ.
CANDIDATES = (GPTQ, Recipe(strength=0.0, ridge=0.1), REFIT, Recipe(strength=0.5, ridge=0.1))
# What a model of few layers is tried with in addition: errors of the correction add up layer after layer.
FULL = (Recipe(strength=1.0, ridge=0.1), Recipe(strength=1.0, ridge=0.01))
FEW_LAYERS = 8
# One row in so many is held out to choose by, none below.
HELD_OUT_ONE_IN = 8
