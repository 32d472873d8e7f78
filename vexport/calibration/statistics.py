"""What a calibration leaves behind: the range of each layer's input and the rows that made it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRange:
    """Smallest and largest input value of a layer over `tokens` tokens."""

    low: float
    high: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Input ranges by layer.

    `rows` are the line numbers used (from 1), `digest` is the SHA-256 of their token ids.
    """

    rows: tuple[int, ...]
    digest: str
    tokens: int
    ranges: Mapping[str, InputRange]
