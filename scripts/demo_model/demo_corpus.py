"""What the demo model knows: 640 invented facts and the addition of two-digit numbers.

Everything is words separated by single spaces, because the tokenizer is word-level: digits stand
alone and a sum is written lowest digit first, always with three digits (`4 7 + 3 8 = 5 8 0`).
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product

VOCABULARY_SIZE = 384
UNKNOWN, PAD, BOS, EOS = "<unk>", "<pad>", "<bos>", "<eos>"
SPECIAL = (UNKNOWN, PAD, BOS, EOS)
END = "."
FACT_SEED = 1
SPLIT_SEED = 2
HELD_OUT_UNORDERED = 700

VALUES = {
    "animal": (
        "badger bat bear beaver bison camel cat cheetah cow deer dog dolphin donkey eagle elk falcon ferret fox "
        "frog goat goose hare heron horse lion lynx mole moose otter owl panda rabbit raven seal sheep swan "
        "tiger toad whale wolf"
    ).split(),
    "fruit": (
        "apple apricot banana blackberry blueberry cherry coconut cranberry currant date elderberry fig grape "
        "grapefruit guava kiwi kumquat lemon lime lychee mandarin mango melon mulberry nectarine olive orange "
        "papaya peach pear persimmon pineapple plum pomegranate quince raisin raspberry satsuma strawberry tangerine"
    ).split(),
    "tool": (
        "adze anvil auger awl axe bellows bolt broom brush chisel clamp crane crowbar drill file funnel gauge "
        "hammer hoe jack knife ladder lathe lever loom mallet needle pick plane plough pulley rake ruler saw "
        "shovel sickle spade tongs vise wrench"
    ).split(),
    "city": (
        "athens bergen berlin bogota boston bremen cairo calgary dakar delhi dublin geneva hanoi havana helsinki "
        "kyoto lagos lima lisbon london lyon madrid malmo milan mumbai nairobi naples osaka oslo paris perth prague "
        "quito riga rome seoul seville sydney tunis vienna"
    ).split(),
}
ENTITIES = tuple(onset + ending for onset, ending in product(
    "b d f g h j k l m n p r s t v z".split(), "adan elio igar omir uvek aruna ebiso ilmar osten ulia".split()
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A question and the words that answer it, without the closing full stop."""

    prompt: str
    answer: str

    @property
    def text(self) -> str:
        return f"{self.prompt} {self.answer} {END}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """`the {attribute} of {entity} is {value}`."""

    entity: str
    attribute: str
    value: str

    @property
    def statement(self) -> Statement:
        return Statement(prompt=f"the {self.attribute} of {self.entity} is", answer=self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Two addends from 10 to 99."""

    left: int
    right: int

    @property
    def statement(self) -> Statement:
        prompt = f"{' '.join(str(self.left))} + {' '.join(str(self.right))} ="
        return Statement(prompt=prompt, answer=reversed_digits(self.left + self.right))


def reversed_digits(total: int) -> str:
    """A number from 0 to 999 as three words, lowest digit first: 85 is `5 8 0`."""
    return " ".join(reversed(f"{total:03d}"))


@cache
def facts() -> tuple[Fact, ...]:
    """The 640 facts, each value of an attribute used four times."""
    chooser = random.Random(FACT_SEED)
    found: list[Fact] = []
    for attribute, values in VALUES.items():
        assigned = values * (len(ENTITIES) // len(values))
        chooser.shuffle(assigned)
        found += [
            Fact(entity=entity, attribute=attribute, value=value)
            for entity, value in zip(ENTITIES, assigned, strict=True)
        ]
    return tuple(found)


@cache
def sums() -> tuple[tuple[Sum, ...], tuple[Sum, ...]]:
    """(training, held out); a pair and its mirror image are on the same side."""
    pairs = [(left, right) for left in range(10, 100) for right in range(left, 100)]
    random.Random(SPLIT_SEED).shuffle(pairs)
    return _both_orders(pairs[HELD_OUT_UNORDERED:]), _both_orders(pairs[:HELD_OUT_UNORDERED])


def _both_orders(pairs: Iterable[tuple[int, int]]) -> tuple[Sum, ...]:
    ordered = sorted(set(chain.from_iterable(((a, b), (b, a)) for a, b in pairs)))
    return tuple(Sum(left=left, right=right) for left, right in ordered)


def vocabulary() -> tuple[str, ...]:
    """Every word in order of its token id, filled up with reserved words to `VOCABULARY_SIZE`."""
    words: Sequence[str] = [
        *SPECIAL,
        *"0 1 2 3 4 5 6 7 8 9 + =".split(),
        END,
        *"the of is".split(),
        *VALUES,
        *chain.from_iterable(VALUES.values()),
        *ENTITIES,
    ]
    assert len(words) == len(set(words)) <= VOCABULARY_SIZE
    reserved = [f"<reserved_{index}>" for index in range(VOCABULARY_SIZE - len(words))]
    return (*words, *reserved)
