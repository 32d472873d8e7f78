"""Mutations of each sound checkpoint: files, headers, names, values, dtypes, shapes, config.

Some mutations are harmless, to show false errors of the check.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from tests.mutations.edits import Change
from tests.mutations.good import GOOD, Sound
from tests.mutations.kinds import arguments, files, forms, mixed, names, values

Part = Callable[[Sound], Iterator[tuple[str, Change]]]
OWN = (names.kinds, values.kinds, forms.kinds, arguments.kinds, mixed.kinds)
SHARED = (
    files.kinds,
    arguments.model_kinds,
    arguments.shared_kinds,
    names.shared_kinds,
    mixed.shared_kinds,
)
PARTS = (*OWN, *SHARED, names.special_kinds)
# Mutations that depend on the scheme are recorded with the scheme's first checkpoint. Further
# checkpoints record one in OWN_ONE_IN. Of other mutations, all record one in SHARED_ONE_IN.
OWN_ONE_IN, SHARED_ONE_IN = 4, 6


@cache
def mutations(good: str) -> Mapping[str, Change]:
    """Return all mutations of a sound checkpoint by name."""
    return {name: change for part in PARTS for name, change in part(GOOD[good])}


def worth_recording(good: str) -> list[str]:
    """Return the mutations to record for a sound checkpoint.

    These are the mutations that only it has, and its share of the others.
    """
    position = list(GOOD).index(good)
    first = all(GOOD[other].scheme != GOOD[good].scheme for other in list(GOOD)[:position])
    return [
        *_dealt(good, (names.special_kinds,), 0, 1),
        *_dealt(good, OWN, position, 1 if first else OWN_ONE_IN),
        *_dealt(good, SHARED, position, SHARED_ONE_IN),
    ]


def _dealt(good: str, parts: Sequence[Part], position: int, one_in: int) -> list[str]:
    """Return each `one_in`-th mutation, counted from `position`."""
    names = [name for part in parts for name, _ in part(GOOD[good])]
    return [name for number, name in enumerate(names, position) if number % one_in == 0]
