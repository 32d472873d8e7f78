"""Read the format and the split of data from the names of files."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from vexport.checkpoint.source import COMPRESSED, SUFFIXES
from vexport.errors import InputError
from vexport.rules import calibration as rules

# Formats of prose. In a folder with files in other formats, they are documents about the data.
TEXT = (".txt", ".md")
# Words in the names of files and folders that mean a split, as `datasets` reads them.
_SPLITS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_WORD = re.compile(r"[^\W_\d]+")


def data_suffix(path: Path) -> str:
    """Return the suffix of the format: `.txt` of a.txt.gz. Compressed data is JSON lines if its
    name has no other suffix.
    """
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED:
        return suffix
    inner = Path(path.stem).suffix.lower()
    return inner if inner in SUFFIXES else ".jsonl"


def choose_split(names: Iterable[str], wanted: str | None, where: str) -> str:
    """Return the split to read: `wanted`, else `train`, else the first that begins with train.

    Raises InputError if the data set does not have the split `wanted`.
    """
    known = list(names)
    if wanted is None:
        return min(known, key=lambda name: (name != "train", not name.startswith("train")))
    if wanted not in known:
        raise InputError.of(rules.SPLIT, where, split=wanted, known=", ".join(known))
    return wanted


def names_split(text: str, split: str) -> bool:
    """Return True if a name contains a split as a word: `data/train-00000-of-00001.parquet`."""
    words = {word.lower() for word in _WORD.findall(text)}
    return bool(words.intersection(_SPLITS.get(split, ()))) or split in re.split(r"[/.\-]", text)


def mentions_split(text: str) -> bool:
    """Return True if a name contains any of the usual splits as a word."""
    return any(names_split(text, split) for split in _SPLITS)
