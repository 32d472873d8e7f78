"""Plain values that several topics share."""

from collections.abc import Callable
from typing import Annotated, Literal

from annotated_types import Gt, Le

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]
# (stage, done, total): what every long stage reports.
OnProgress = Callable[[str, int, int], None]
# Separates a stage's name from its current detail.
PROGRESS_DETAIL = ": now "


def silent(stage: str, done: int, total: int) -> None:
    """An OnProgress that reports to nowhere."""


def named(what: str, on_progress: OnProgress) -> OnProgress:
    """An OnProgress whose stages begin with `what`: `baseline: load`."""
    return lambda stage, done, total: on_progress(f"{what}: {stage}", done, total)


# The largest whole number for clocks and loops: beyond it Python's own functions raise.
MOST_COUNT = 2**31 - 1
Positive = Annotated[int, Gt(0), Le(MOST_COUNT)]


def about(documents: int) -> str:
    """An estimate of documents with two digits: 70941 is `about 71,000`."""
    scale = 10 ** max(0, len(str(documents)) - 2)
    return f"about {-(-documents // scale) * scale:,}"


def json_type(value: object) -> str:
    """Return the name of the type of a JSON value, as messages show it."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def plural(number: int, noun: str, nouns: str = "") -> str:
    """Return `1 error` or `2 errors`; `nouns` is the plural if an s is not enough."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {nouns or f'{noun}s'}"
