"""Mutations of each sound checkpoint: files, headers, names, values, dtypes, shapes, config.

Some mutations are harmless, to show false errors of the check.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from tests.mutations.edits import Change
from tests.mutations.good import GOOD, Sound
from tests.mutations.kinds import arguments, files, forms, mixed, names, values

Part = Callable[[Sound], Iterator[tuple[str, Change]]]
SCHEME_PARTS = (names.kinds, values.kinds, forms.kinds, arguments.kinds, mixed.kinds)
SHARED_PARTS = (
    files.kinds,
    arguments.model_kinds,
    arguments.shared_kinds,
    names.shared_kinds,
    mixed.shared_kinds,
)
ALL_PARTS = (*SCHEME_PARTS, *SHARED_PARTS, names.special_kinds)
# The first checkpoint of a scheme records all mutations that depend on the scheme. Its other
# checkpoints record every SCHEME_INTERVAL-th of them. All checkpoints record every
# SHARED_INTERVAL-th of the mutations that do not depend on the scheme.
SCHEME_INTERVAL, SHARED_INTERVAL = 4, 6


@cache
def mutations(good: str) -> Mapping[str, Change]:
    """Return all mutations of a sound checkpoint by name."""
    return {name: change for part in ALL_PARTS for name, change in part(GOOD[good])}


def worth_recording(good: str) -> list[str]:
    """Return the mutations to record for a sound checkpoint.

    These are all mutations of special features of this checkpoint, and a sample of other mutations.
    """
    position = list(GOOD).index(good)
    first = all(GOOD[other].scheme != GOOD[good].scheme for other in list(GOOD)[:position])
    return [
        *_selected(good, (names.special_kinds,), 0, 1),
        *_selected(good, SCHEME_PARTS, position, 1 if first else SCHEME_INTERVAL),
        *_selected(good, SHARED_PARTS, position, SHARED_INTERVAL),
    ]


def _selected(good: str, parts: Sequence[Part], position: int, interval: int) -> list[str]:
    """Return every `interval`-th mutation, counted from `position`."""
    names = [name for part in parts for name, _ in part(GOOD[good])]
    return [name for number, name in enumerate(names, position) if number % interval == 0]
