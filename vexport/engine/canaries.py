"""Looks at greedy continuations for what a broken export does: nothing, an early end, one thing for ever."""

from collections.abc import Sequence

from vexport.types import Canary, Finding, Severity

# A continuation that ends in this many rounds of a cycle of at most so many words says one thing for ever.
_ROUNDS = 4
_LONGEST_CYCLE = 6
_FIX = "compare the checkpoint with its source (`vexport check --source`), or quantize with a finer scheme"


def canary_findings(canaries: Sequence[Canary], baseline: Sequence[Canary] | None = None) -> list[Finding]:
    """A finding for each degenerate continuation.

    With the baseline's continuations of the same prompts, one that the baseline shares is none; the others
    are errors if they are half of all or more, else warnings, since one continuation may change by chance.
    Without a baseline each is a warning: the model may have the habit itself.
    """
    shared = {canary.prompt: symptom(canary) for canary in baseline or ()}
    degenerate = [
        (number, canary, found)
        for number, canary in enumerate(canaries)
        if (found := symptom(canary)) is not None and shared.get(canary.prompt) is None
    ]
    broken = baseline is not None and 2 * len(degenerate) >= len(canaries)
    severity: Severity = "error" if broken else "warning"
    return [_finding(number, canary, found, severity) for number, canary, found in degenerate]


def symptom(canary: Canary) -> str | None:
    """What is wrong with a continuation: `empty`, `repetition`, or None."""
    if not canary.text.strip():
        return "empty"
    words = canary.text.split()
    if len(words) < _ROUNDS:
        words = list(canary.text.strip())
    return "repetition" if _cycles(words) else None


def _cycles(words: Sequence[str]) -> bool:
    """Whether the end of `words` is the same one to six words, four times or more."""
    for length in range(1, _LONGEST_CYCLE + 1):
        end = words[-length * _ROUNDS :]
        if len(end) == length * _ROUNDS and all(end[i] == end[i % length] for i in range(len(end))):
            return True
    return False


def _finding(number: int, canary: Canary, found: str, severity: Severity) -> Finding:
    return Finding(
        check="canary",
        severity=severity,
        where=f"greedy continuation {number} of {canary.prompt[:40]!r}",
        expected="text that goes on without repeating itself",
        got=f"{found} after {canary.tokens} tokens ({canary.finish_reason}): {canary.text[-80:]!r}",
        fix=_FIX,
    )
