"""Define rows of the table, and the sizes of its measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vexport.records.calibration import Rounding

FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Row:
    """A measured value.

    `least` and `most` are its bounds if it decides something. `note` is the reason if it was
    skipped.
    """

    name: str
    value: float | None = None
    unit: str = ""
    note: str = ""
    least: float | None = None
    most: float | None = None
    stage: str = ""

    @property
    def is_bad(self) -> bool:
        """Return True if the measurement failed or is out of its bounds."""
        if self.value is None:
            return self.name == FAILED
        low, high = self.least, self.most
        return (low is not None and self.value < low) or (high is not None and self.value > high)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model of random weights."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the measurements.

    `matrix` is for kernels, and `tile_rows` and `tile_schemes` for the Triton kernel. `small` and
    `large` are for the random models, `samples` and `tokens` for the text.
    """

    matrix: int
    tile_rows: int
    tile_schemes: tuple[str, ...]
    small: ModelSizes
    large: ModelSizes
    samples: int
    tokens: int
    schemes: tuple[str, ...]
    # Schemes and methods that round the demo.
    ways: tuple[tuple[str, Rounding], ...]
    # Further checkpoints to load.
    checkpoints: tuple[Path, ...] = ()

    @classmethod
    def of(cls, device: str) -> "Sizes":
        """Return large sizes for a GPU, and small sizes for the rehearsal on a CPU."""
        if device == "cpu":
            ways: tuple[tuple[str, Rounding], ...] = (("FP8", "nearest"), ("NVFP4", "refit"))
            tiny = ModelSizes(hidden=128, intermediate=256, layers=2, vocabulary=384)
            # Triton's interpreter takes about 10 ms for each column of a tile of 16 rows.
            tile_schemes: tuple[str, ...] = ("W4A16",)
            schemes: tuple[str, ...] = ("W4A16", "NVFP4A16")
            return cls(256, 16, tile_schemes, tiny, tiny, 4, 64, schemes, ways)
        schemes = ("W4A16", "NVFP4A16", "NVFP4", "MXFP4A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK")
        ways = (("FP8", "nearest"), ("W4A16", "gptq"), ("W4A16", "refit"), ("NVFP4", "refit"))
        tile_schemes = ("W4A16", "W8A8", "NVFP4A16", "FP8_BLOCK")
        small = ModelSizes(hidden=768, intermediate=2048, layers=12, vocabulary=16000)
        large = ModelSizes(hidden=2048, intermediate=5632, layers=22, vocabulary=32000)
        return cls(4096, 4096, tile_schemes, small, large, 32, 512, schemes, ways)


def markdown(rows: Sequence[Row]) -> str:
    """Return the table under the name of the card."""
    card = next((row.note for row in rows if row.name == "card"), "no card")
    lines = [f"# vexport on {card}", "", "| stage | | value | bound | |", "|---" * 5 + "|"]
    for row in rows:
        value = "" if row.value is None else f"{row.value:.6g} {row.unit}".strip()
        bounds = [f"at least {row.least:g}"] if row.least is not None else []
        bounds += [f"at most {row.most:g}"] if row.most is not None else []
        note = f"**bad** {row.note}".strip() if row.is_bad else row.note
        lines.append(
            "| " + " | ".join((row.stage, row.name, value, ", ".join(bounds), note)) + " |"
        )
    return "\n".join(lines) + "\n"
