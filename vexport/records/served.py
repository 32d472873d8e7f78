"""Comparison of a server's statements with the dry load of a checkpoint."""

from dataclasses import dataclass
from typing import Literal

# Of a server's value next to the value of a dry load. The server or the dry load may lack it.
ComparedStatus = Literal["equal", "differs", "not stated", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedValue:
    """A value of a server next to the value of the dry load. A missing value is empty.

    If the status is "unknown", the dry load has no value. `line` is the line of the log. `reason`
    says what causes a difference, if it is known.
    """

    name: str
    status: ComparedStatus
    server: str
    dry_load: str
    line: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerComparison:
    """Comparison of a server's `log`, or of its address, with the dry load of a checkpoint."""

    log: str
    values: tuple[ComparedValue, ...]
