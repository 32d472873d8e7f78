"""Plain values that several topics share."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from annotated_types import Gt, Le

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]
# Called with (stage, done, total) to report the progress of every long stage.
OnProgress = Callable[[str, int, int], None]
# Separates a stage's name from its current detail.
PROGRESS_DETAIL = ": now "


def silent(stage: str, done: int, total: int) -> None:
    """Ignore the progress."""


def named(what: str, on_progress: OnProgress) -> OnProgress:
    """Return an OnProgress that adds `what` to the names of stages: `baseline: load`."""
    return lambda stage, done, total: on_progress(f"{what}: {stage}", done, total)


# The largest whole number for clocks and loops. Python's functions raise for larger numbers.
MOST_COUNT = 2**31 - 1
Positive = Annotated[int, Gt(0), Le(MOST_COUNT)]


def about(documents: int) -> str:
    """Return a number of documents rounded up to two digits: `about 71,000` for 70941."""
    scale = 10 ** max(0, len(str(documents)) - 2)
    return f"about {-(-documents // scale) * scale:,}"


def decimals_of(limit: float) -> int:
    """Return how many decimals show a limit with two digits: 4 for 0.00995, and at least 2."""
    if not 0 < limit < math.inf:
        return 2
    return min(9, max(2, 1 - math.floor(math.log10(limit))))


def join_limited(texts: Sequence[str], between: str, most: int) -> str:
    """Join at most `most` texts, and add the number of the remaining texts: `a, b and 3 more`."""
    more = len(texts) - most
    return between.join(texts[:most]) + (f" and {more:,} more" if more > 0 else "")


def json_type(value: object) -> str:
    """Return the type of a JSON value as messages show it."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
