"""Which rounding a layer gets, and with what strength."""

from dataclasses import dataclass
from typing import Literal

RoundingName = Literal["nearest", "gptq", "refit"]
ROUNDINGS: tuple[RoundingName, ...] = ("nearest", "gptq", "refit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to round: `strength` 0 is GPTQ. `ridge` is added to H as a share of its diagonal's mean."""

    strength: float
    ridge: float


# llm-compressor's damping. What is left of a refit where it does not help.
GPTQ = Recipe(strength=0.0, ridge=0.01)
# A quarter of the refit: better than GPTQ and than a half for W4A16 on SmolLM2-135M.
REFIT = Recipe(strength=0.25, ridge=0.1)
CANDIDATES = (Recipe(strength=0.0, ridge=0.1), REFIT, Recipe(strength=0.5, ridge=0.1))
