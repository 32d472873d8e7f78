"""How weights were rounded."""

from dataclasses import dataclass
from typing import Literal

Rounding = Literal["nearest", "gptq", "refit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRounding:
    """How the weights of a fusion group were rounded.

    `damping` made H positive definite; None where nothing did, and they are rounded to nearest.
    `nearest_error` and `error` are |X~ (Q - W)^T|^2 / |X~ W^T|^2 of rounding to nearest and of these weights,
    over the `tokens` of calibration.
    """

    name: str
    damping: float | None
    dead_columns: int
    tokens: int
    nearest_error: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRounding:
    """The groups of a decoder layer, and how far its output is from the source's: |h~ - h|^2 / |h|^2."""

    groups: tuple[GroupRounding, ...]
    state_error: float
