"""Define the demo model's training data: 640 invented facts and the addition of two-digit numbers.

Everything is words separated by single spaces, because the tokenizer is word-level. Each digit is a
word, and a sum is written lowest digit first, always with three digits (`4 7 + 3 8 = 5 8 0`).
"""

import argparse
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "scenarios/demo"
VOCABULARY_SIZE = 384
UNKNOWN, PAD, BOS, EOS = "<unk>", "<pad>", "<bos>", "<eos>"
SPECIAL = (UNKNOWN, PAD, BOS, EOS)
END = "."
FACT_SEED = 1
SPLIT_SEED = 2
HELD_OUT_UNORDERED = 700

# Each line of values.txt: `attribute: value value ...`, 40 values each.
VALUES = {
    attribute: values.split()
    for attribute, _, values in (
        line.partition(": ")
        for line in Path(__file__).with_name("values.txt").read_text(encoding="utf-8").splitlines()
    )
}
NAME_ENDINGS = ("adan", "elio", "igar", "omir", "uvek", "aruna", "ebiso", "ilmar", "osten", "ulia")
ENTITIES = tuple(onset + ending for onset, ending in product("bdfghjklmnprstvz", NAME_ENDINGS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A question and the words that answer it, without the closing full stop."""

    prompt: str
    answer: str

    @property
    def text(self) -> str:
        return f"{self.prompt} {self.answer} {END}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact(Statement):
    """A fact `the {attribute} of {entity} is {value}`. The value is the answer."""

    attribute: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum(Statement):
    """Two addends from 10 to 99, with their sum."""

    total: int


def reversed_digits(total: int) -> str:
    """Return a number from 0 to 999 as three words, lowest digit first: 85 is `5 8 0`."""
    return " ".join(reversed(f"{total:03d}"))


def folder_argument(description: str | None) -> Path:
    """Parse the folder to write to, by default scenarios/demo."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=DEMO)
    out: Path = parser.parse_args().out
    return out


@cache
def facts() -> tuple[Fact, ...]:
    """Return the 640 facts. Each value of an attribute is used four times."""
    chooser = random.Random(FACT_SEED)
    found: list[Fact] = []
    for attribute, values in VALUES.items():
        assigned = values * (len(ENTITIES) // len(values))
        chooser.shuffle(assigned)
        found += [
            Fact(prompt=f"the {attribute} of {entity} is", answer=value, attribute=attribute)
            for entity, value in zip(ENTITIES, assigned, strict=True)
        ]
    return tuple(found)


@cache
def sums() -> tuple[tuple[Sum, ...], tuple[Sum, ...]]:
    """Return (training, held out). A pair and its mirror image are in the same part."""
    pairs = [(left, right) for left in range(10, 100) for right in range(left, 100)]
    random.Random(SPLIT_SEED).shuffle(pairs)
    return _both_orders(pairs[HELD_OUT_UNORDERED:]), _both_orders(pairs[:HELD_OUT_UNORDERED])


def _both_orders(pairs: Iterable[tuple[int, int]]) -> tuple[Sum, ...]:
    ordered = sorted(set(chain.from_iterable(((a, b), (b, a)) for a, b in pairs)))
    return tuple(
        Sum(
            prompt=f"{' '.join(str(left))} + {' '.join(str(right))} =",
            answer=reversed_digits(left + right),
            total=left + right,
        )
        for left, right in ordered
    )


def vocabulary() -> tuple[str, ...]:
    """Return every word in the order of its token id.

    Reserved words fill the vocabulary up to `VOCABULARY_SIZE`.
    """
    words: Sequence[str] = [
        *SPECIAL,
        *"0123456789+=",
        END,
        "the",
        "of",
        "is",
        *VALUES,
        *chain.from_iterable(VALUES.values()),
        *ENTITIES,
    ]
    assert len(words) == len(set(words)) <= VOCABULARY_SIZE
    reserved = [f"<reserved_{index}>" for index in range(VOCABULARY_SIZE - len(words))]
    return (*words, *reserved)
