"""Plain values that several topics share."""

from typing import Literal

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]
