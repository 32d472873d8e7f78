"""Rows of the table, and the sizes of its measurements."""

from collections.abc import Sequence
from dataclasses import dataclass

FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: `least` and `most` bound it where it decides something. `note` says why one was skipped."""

    name: str
    value: float | None = None
    unit: str = ""
    note: str = ""
    least: float | None = None
    most: float | None = None
    stage: str = ""

    @property
    def is_bad(self) -> bool:
        """True where it failed or is out of its bounds."""
        if self.value is None:
            return self.name == FAILED
        low, high = self.least, self.most
        return (low is not None and self.value < low) or (high is not None and self.value > high)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: the sides of a matrix, the random model's sides, layers and words, the text."""

    matrix: int
    bandwidth_bytes: int
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    samples: int
    tokens: int
    schemes: tuple[str, ...]

    @classmethod
    def of(cls, device: str) -> "Sizes":
        """Large ones for a GPU, small ones for the rehearsal on a CPU."""
        if device == "cpu":
            return cls(256, 1 << 24, 128, 256, 2, 384, 4, 64, ("W4A16", "NVFP4A16"))
        schemes = ("W4A16", "NVFP4A16", "NVFP4", "MXFP4A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK")
        return cls(4096, 1 << 30, 2048, 5632, 22, 32000, 32, 512, schemes)


def markdown(rows: Sequence[Row]) -> str:
    """The table under the name of the card."""
    card = next((row.note for row in rows if row.name == "card"), "no card")
    lines = [f"# vexport on {card}", "", "| stage | | value | bound | |", "|---|---|---|---|---|"]
    for row in rows:
        value = "" if row.value is None else f"{row.value:.6g} {row.unit}".strip()
        bounds = [f"at least {row.least:g}"] if row.least is not None else []
        bounds += [f"at most {row.most:g}"] if row.most is not None else []
        note = f"**bad** {row.note}".strip() if row.is_bad else row.note
        lines.append(f"| {row.stage} | {row.name} | {value} | {', '.join(bounds)} | {note} |")
    return "\n".join(lines) + "\n"
