"""Every error a person can meet: one line that says where, what was found, what was needed, what to do.

An exception owns its exit code; `cli.main` is the only place that turns one into output.
"""

import difflib
from collections.abc import Sequence


class VexportError(Exception):
    """A problem with a place and a remedy, printed as `where: got X, need Y; do Z`."""

    exit_code = 2

    def __init__(self, where: str, *, got: str, need: str, fix: str) -> None:
        self.where, self.got, self.need, self.fix = where, got, need, fix
        super().__init__(f"{where}: got {got}, need {need}; {fix}")


class InputError(VexportError):
    """Bad usage or bad input (exit 2)."""


class InputErrors(InputError):
    """Several problems of one input, reported together (exit 2)."""

    def __init__(self, problems: Sequence[InputError]) -> None:
        if not problems:
            raise ValueError("InputErrors: got no problem, need at least one; raise only what was found")
        self.problems = tuple(problems)
        first = problems[0]
        super().__init__(first.where, got=first.got, need=first.need, fix=first.fix)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class CheckpointFailed(VexportError):
    """The checkpoint is at fault: an error finding, a refused load, a regression (exit 1)."""

    exit_code = 1


class Inconclusive(VexportError):
    """The evidence does not settle the question (exit 3)."""

    exit_code = 3


class EnvironmentFault(VexportError):
    """The environment is at fault: vLLM missing, crashed, out of memory, timed out (exit 4)."""

    exit_code = 4


def raise_all(problems: Sequence[InputError]) -> None:
    """Raise the problems of one input together; return when there is none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise InputErrors(problems)


def nearest(word: str, known: Sequence[str]) -> str:
    """` (did you mean X?)` for the known word nearest to `word`, else nothing."""
    lowered = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), lowered, n=1)
    return f" (did you mean {lowered[matches[0]]}?)" if matches else ""
