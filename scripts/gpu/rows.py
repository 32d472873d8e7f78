"""Rows of the table, the sizes of its measurements, and the least work that they are."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vexport.records import Plan
from vexport.records.calibration import Rounding

FAILED = "failed"
SHARES = "Products, copies: shares of the measured peaks, of copies by the bytes that are moved at least."


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: `least` and `most` bound it where it decides something. `note` says why one was skipped.

    Of a time `products` and `copies` are the shares of the device's peaks that it comes to.
    """

    name: str
    value: float | None = None
    unit: str = ""
    note: str = ""
    least: float | None = None
    most: float | None = None
    stage: str = ""
    products: float | None = None
    copies: float | None = None

    @property
    def is_bad(self) -> bool:
        """True where it failed or is out of its bounds."""
        if self.value is None:
            return self.name == FAILED
        low, high = self.least, self.most
        return (low is not None and self.value < low) or (high is not None and self.value > high)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Operations a second of products, bf16 on a card, and bytes a second of copies, both ways counted."""

    products: float
    copies: float

    def row(self, name: str, seconds: float, *, work: float, moved: float) -> Row:
        """The time of so many operations, for which at least `moved` bytes go to and from the memory."""
        return Row(
            name,
            1e3 * seconds,
            "ms",
            products=work / seconds / self.products,
            copies=moved / seconds / self.copies,
        )


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
    # What the demo is rounded by.
    ways: tuple[tuple[str, Rounding], ...]

    @classmethod
    def of(cls, device: str) -> "Sizes":
        """Large ones for a GPU, small ones for the rehearsal on a CPU."""
        if device == "cpu":
            ways: tuple[tuple[str, Rounding], ...] = (("FP8", "nearest"), ("NVFP4", "refit"))
            return cls(256, 1 << 24, 128, 256, 2, 384, 4, 64, ("W4A16", "NVFP4A16"), ways)
        schemes = ("W4A16", "NVFP4A16", "NVFP4", "MXFP4A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK")
        ways = (("FP8", "nearest"), ("W4A16", "gptq"), ("W4A16", "refit"), ("NVFP4", "refit"))
        return cls(4096, 1 << 30, 2048, 5632, 22, 32000, 32, 512, schemes, ways)


def rounding_cost(plan: Plan, rows: Sequence[int], *, drift: bool) -> tuple[float, float]:
    """Operations: forwards of both streams, columns passed on, half of H, and of a refit the drift.

    Bytes: every row reads the 16-bit weights in both streams and reads and writes the sums; each weight is
    read and written in float32 once.
    """
    work = moved = 0.0
    for group in plan.groups:
        columns = group.members[0].in_features
        work += (3 if drift else 1) * sum(rows) * columns**2
        moved += (16 if drift else 8) * len(rows) * columns**2
        for member in group.members:
            work += member.out_features * columns * (4 * sum(rows) + columns)
            moved += member.out_features * columns * (4 * len(rows) + 8)
    return work, moved


def look_back_cost(plan: Plan, rows: Sequence[int]) -> tuple[float, float]:
    """Three products of a token and a weight: up, up again, back. For each a row reads the weights."""
    weights = sum(one.out_features * one.in_features for group in plan.groups for one in group.members)
    return 6.0 * weights * sum(rows), 6.0 * weights * len(rows)


def run_here(stage: str, device: str, folder: Path) -> None:
    """Write the rows of a stage to STAGE.jsonl as they come, in this process, and its output to STAGE.log."""
    with (folder / f"{stage}.log").open("w") as log, (folder / f"{stage}.jsonl").open("w") as lines:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        import stages

        for row in getattr(stages, stage)(device, Sizes.of(device), folder):
            print(json.dumps(asdict(replace(row, stage=stage))), file=lines, flush=True)


def markdown(rows: Sequence[Row]) -> str:
    """The table under the name of the card."""
    card = next((row.note for row in rows if row.name == "card"), "no card")
    header = "| stage | | value | products | copies | bound | |"
    lines = [f"# vexport on {card}", "", SHARES, "", header, "|---" * 7 + "|"]
    for row in rows:
        value = "" if row.value is None else f"{row.value:.6g} {row.unit}".strip()
        bounds = [f"at least {row.least:g}"] if row.least is not None else []
        bounds += [f"at most {row.most:g}"] if row.most is not None else []
        note = f"**bad** {row.note}".strip() if row.is_bad else row.note
        shares = ("" if share is None else f"{share:.1%}" for share in (row.products, row.copies))
        lines.append("| " + " | ".join((row.stage, row.name, value, *shares, ", ".join(bounds), note)) + " |")
    return "\n".join(lines) + "\n"
