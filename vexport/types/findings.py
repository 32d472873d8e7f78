"""What a check or a load found."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing a check saw: the place, what was expected, what was found, what to do."""

    check: str
    severity: Severity
    where: str
    expected: str
    got: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: got {self.got}, need {self.expected}; {self.fix} [{self.check}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The findings on one checkpoint; `ok` means that none of them is an error."""

    checkpoint: str
    ok: bool
    findings: tuple[Finding, ...]
