"""Whole numbers that clocks and loops can take: beyond them Python's own functions raise."""

from typing import Annotated

from annotated_types import Gt, Le

MOST_COUNT = 2**31 - 1
Positive = Annotated[int, Gt(0), Le(MOST_COUNT)]
