"""Where calibration text comes from, and how it becomes samples."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationData:
    """A set of calibration text and how it is read.

    `name` is a file, a folder, ORG/NAME[@REVISION][:SPLIT[:COLUMN]] of the hub or `default`. `column` holds
    the text or the turns; without it the usual names are tried. With `seed` rows are shuffled. `pack` joins
    rows into samples of exactly `seq_len` tokens; None packs plain text alone.
    """

    name: str
    samples: int
    seq_len: int
    split: str | None = None
    subset: str | None = None
    column: str | None = None
    seed: int | None = None
    pack: bool | None = None
