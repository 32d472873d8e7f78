"""Functions that create findings by severity. Each rule states what it claims (`Claim`)."""

from collections.abc import Sequence

from vexport.records import Claim, Finding, LoaderFault


def error(
    check: str,
    where: str,
    *,
    claim: Claim | None,
    expected: str,
    got: str,
    fix: str,
    loader_faults: Sequence[LoaderFault] | None = None,
    tp: Sequence[int] = (),
    sm: Sequence[int] = (),
) -> Finding:
    """Return a finding that fails the checkpoint.

    By default, vLLM's loaders decide about a claim that vLLM refuses the checkpoint, and about
    no other claim. `loader_faults` overrides this: it is empty if vLLM refuses the checkpoint after
    loading, or before, such as for want of a tokenizer.
    """
    usual: tuple[LoaderFault, ...] = ("refused",) if claim == "refused" else ()
    return Finding(
        check=check,
        claim=claim,
        severity="error",
        where=where,
        expected=expected,
        got=got,
        fix=fix,
        loader_faults=usual if loader_faults is None else tuple(loader_faults),
        tp=tuple(tp),
        sm=tuple(sm),
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
