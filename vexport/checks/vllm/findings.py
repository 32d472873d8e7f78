"""Findings of the checks by severity."""

from vexport.records import Finding


def error(check: str, where: str, *, expected: str, got: str, fix: str) -> Finding:
    """A finding that fails the checkpoint."""
    return Finding(check=check, severity="error", where=where, expected=expected, got=got, fix=fix)


def warning(check: str, where: str, *, expected: str, got: str, fix: str) -> Finding:
    """A finding of an oddity that changes nothing, or that vLLM may mind on another device."""
    return Finding(
        check=check, severity="warning", where=where, expected=expected, got=got, fix=fix
    )


def info(check: str, where: str, *, expected: str, got: str, fix: str) -> Finding:
    """A finding of what is good to know."""
    return Finding(check=check, severity="info", where=where, expected=expected, got=got, fix=fix)
