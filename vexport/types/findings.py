"""What a check or a load found."""

from dataclasses import dataclass
from typing import Literal, Self

from vexport.errors import VexportError

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

    @classmethod
    def of(cls, error: VexportError, *, check: str, severity: Severity) -> Self:
        """What an error says, as a finding."""
        return cls(
            check=check,
            severity=severity,
            where=error.where,
            expected=error.need,
            got=error.got,
            fix=error.fix,
        )

    def __str__(self) -> str:
        return f"{self.where}: got {self.got}, need {self.expected}; {self.fix} [{self.check}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The findings on one checkpoint; `ok` means that none of them is an error.

    `vllm`, `tp` and `sm` say what it was judged for: a version, tensor parallel sizes and compute
    capabilities, of which none means any. A report from before they were written has no version.
    """

    checkpoint: str
    ok: bool
    findings: tuple[Finding, ...]
    vllm: str = ""
    tp: tuple[int, ...] = ()
    sm: tuple[int, ...] = ()
