"""Functions that create findings by severity. Each rule states what it claims (`Claim`)."""

from vexport.records import Claim, Finding


def error(
    check: str, where: str, *, claim: Claim | None, expected: str, got: str, fix: str
) -> Finding:
    """Return a finding that fails the checkpoint."""
    return Finding(
        check=check,
        claim=claim,
        severity="error",
        where=where,
        expected=expected,
        got=got,
        fix=fix,
    )


def warning(
    check: str, where: str, *, claim: Claim | None, expected: str, got: str, fix: str
) -> Finding:
    """Return a finding on a possible problem, which does not fail the checkpoint."""
    return Finding(
        check=check,
        claim=claim,
        severity="warning",
        where=where,
        expected=expected,
        got=got,
        fix=fix,
    )


def info(
    check: str, where: str, *, claim: Claim | None, expected: str, got: str, fix: str
) -> Finding:
    """Return a finding for information only."""
    return Finding(
        check=check,
        claim=claim,
        severity="info",
        where=where,
        expected=expected,
        got=got,
        fix=fix,
    )
