"""Errors with a place, the wrong value, the valid values and a remedy; escaping of foreign text.

Each exception class has its exit code. Only `cli.main` turns exceptions into output.
"""

import difflib
import errno
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Self

from vexport.rules import environment, file, internal
from vexport.rules.book import Rule
from vexport.words import alternatives, clip

# C0 and C1 controls, DEL, lone surrogates, non-characters, line separators, zero-width and bidi
# marks. They are illegal in XML, are commands to a terminal, or disguise text.
_HIDDEN_CHARACTERS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def visible(text: str, keep: str = "") -> str:
    r"""Return `text` with control and invisible characters written out (`\x1b`, `\u202e`).

    Characters in `keep` stay as they are.
    """
    return _HIDDEN_CHARACTERS.sub(
        lambda match: match[0] if match[0] in keep else _escaped(match[0]), text
    )


def _escaped(character: str) -> str:
    code = ord(character)
    return _ESCAPES.get(character, f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, printable and short.

    If the error has no text, return the name of its class.
    """
    line = (str(error).splitlines() or [""])[0].rstrip(" :") or type(error).__name__
    return "".join(each if each.isprintable() else "?" for each in line)[:200]


def problem_text(where: str, *, got: str, need: str, fix: str) -> str:
    """Return `where: got X, need Y; do Z`. Each part but the place may be empty."""
    found = f"got {got}, need {need}" if got and need else got or f"need {need}"
    return f"{where}: {found}; {fix}" if fix else f"{where}: {found}"


class VexportError(Exception):
    """A problem with a place and a remedy, printed as `where: got X, need Y; do Z`.

    If `need` is empty, `got` is a whole clause: `X is not a multiple of Y` for a wrong value, or a
    description of what happened. If `got` is empty, `need` says everything. If `fix` is empty,
    earlier output contains the remedy. `rule` is the id of the rule, and `facts` are what the
    rule's sentences were made from.
    """

    exit_code = 2

    def __init__(
        self,
        where: str,
        *,
        got: str,
        need: str,
        fix: str,
        rule: str = "",
        facts: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.where, self.got, self.need, self.fix, self.rule = where, got, need, fix, rule
        self.facts = facts
        super().__init__(problem_text(where, got=got, need=need, fix=fix))

    @classmethod
    def of(cls, rule: Rule, where: str, /, **facts: object) -> Self:
        """Return the error that `where` breaks the rule, with the facts of its templates."""
        texts = rule.sentences(facts)
        return cls(where, got=texts.got, need=texts.need, fix=texts.do, rule=rule.id, facts=facts)

    def moved(self, where: str, *, fix: str = "") -> Self:
        """Return the same error at another place. `fix` replaces the remedy."""
        fix = fix or self.fix
        return type(self)(
            where, got=self.got, need=self.need, fix=fix, rule=self.rule, facts=self.facts
        )


class InputError(VexportError):
    """Bad usage or bad input (exit 2)."""


def error_kind(exit_code: int) -> type[VexportError]:
    """Return the plain class of the errors with this exit code: the first that is defined."""
    return next(kind for kind in VexportError.__subclasses__() if kind.exit_code == exit_code)


class _Multiple(VexportError):
    """Several problems that are reported together, each on a line."""

    def __init__(self, problems: Sequence[VexportError]) -> None:
        if not problems:
            raise ValueError(f"{type(self).__name__}: got no problem, need at least one")
        self.problems = tuple(problems)
        first = problems[0]
        super().__init__(
            first.where, got=first.got, need=first.need, fix=first.fix, rule=first.rule
        )

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class InputErrors(_Multiple, InputError):
    """Several problems of an input (exit 2)."""

    problems: tuple[InputError, ...]


class CheckpointFailed(VexportError):
    """A failure of the checkpoint: an error finding, a refused load, a regression (exit 1)."""

    exit_code = 1


class Inconclusive(VexportError):
    """Evidence that does not settle the question (exit 3)."""

    exit_code = 3


class EnvironmentFault(VexportError):
    """A fault of the environment: vLLM missing, crashed, out of memory, timed out (exit 4)."""

    exit_code = 4


class EnvironmentFaults(_Multiple, EnvironmentFault):
    """Several faults (exit 4)."""


class InternalError(VexportError):
    """A bug in vexport that stopped one part of the work (exit 4).

    The other parts of the work continue. The traceback is logged for `--debug`.
    """

    exit_code = 4

    def __init__(self, where: str, error: Exception) -> None:
        got = clip(f"{type(error).__name__}: {error}".splitlines()[0], 300)
        rule, place = internal.EXCEPTION, f"internal error in {where}"
        super().__init__(place, got=got, need="", fix=rule.do, rule=rule.id)
        logging.getLogger(__name__).debug("%s", where, exc_info=error)


# Error codes caused by a wrong path. All other error codes are faults of the machine.
_WRONG_PATH = frozenset(
    (
        errno.EACCES,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
    )
) | {errno.ENOTDIR, errno.EPERM, errno.EROFS}
_DISK_FULL_CODES = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def convert_os_error(error: OSError) -> VexportError:
    """Convert an error of the operating system.

    Returns an InputError if the path is wrong (exit 2), and otherwise an EnvironmentFault (exit 4).
    """
    # A failed copy has two paths: the source (`filename`) and the destination (`filename2`). If the
    # disk is full, the destination's disk is full.
    is_full = error.errno in _DISK_FULL_CODES and error.filename2 is not None
    where = clip(str((error.filename2 if is_full else error.filename) or "file system"), 200)
    reason = error.strerror or error
    if error.errno in _WRONG_PATH:
        return InputError.of(file.PATH, where, reason=reason)
    return EnvironmentFault.of(environment.DISK, where, reason=reason)


# Error codes of a broken disk or an unreachable file server. The file itself may be intact.
_UNREADABLE = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENXIO})


def require_working_disk(error: Exception, path: Path) -> None:
    """Raise EnvironmentFault if reading `path` failed because a disk or server is gone."""
    if isinstance(error, OSError) and error.errno in _UNREADABLE:
        error.filename = error.filename or str(path)
        raise convert_os_error(error) from None


def raise_all(problems: Sequence[InputError]) -> None:
    """Raise the problems of an input together. Return if there are none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise InputErrors(problems)


def nearest_hint(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for the known word nearest to `word`, else ""."""
    names = nearest_names(word, known, most=1)
    return f" (did you mean {names[0]}?)" if names else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the sentence ` Did you mean X, Y or Z?` for the nearest known words, else ""."""
    names = nearest_names(word, known, most=3)
    return f" Did you mean {alternatives(names)}?" if names else ""


def nearest_names(word: str, known: Iterable[str], *, most: int) -> list[str]:
    """Return at most `most` known words that are similar to `word`, the nearest first."""
    lowered = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), lowered, n=most)
    return [lowered[match] for match in matches]
