"""How weights were rounded."""

from dataclasses import dataclass
from typing import Literal

Rounding = Literal["nearest", "gptq", "refit"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "gptq", "refit")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRounding:
    """How the weights of a fusion group were rounded.

    `fallback` says why they were rounded to nearest, although a rule asks for more. `damping` is what was
    added to H, as a share of its diagonal's mean. `nearest_error` and `error` are |X~ (Q - W)^T|^2 /
    |X~ W^T|^2 of rounding to nearest and of these weights, over the `tokens` of calibration.
    """

    name: str
    fallback: str | None = None
    damping: float = 0.0
    dead_columns: int = 0
    tokens: int = 0
    nearest_error: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRounding:
    """The groups of a decoder layer, and how far its output is from the source's: |h~ - h|^2 / |h|^2."""

    groups: tuple[GroupRounding, ...]
    state_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Strength:
    """How much of the refit was taken, and the KL over rows held out, nats per token, where some were."""

    strength: float
    ridge: float
    divergence: float | None
