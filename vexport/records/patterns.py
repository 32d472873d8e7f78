"""Regular expressions from configs and scenarios: compiled once, with a time limit."""

import re
import resource
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType

from vexport.errors import InputError
from vexport.rules import rules
from vexport.words import clip

# Time limit for rendering a conversation with a chat template. Real templates take milliseconds.
TEMPLATE_SECONDS = 10.0
# Memory limit for rendering a conversation with a chat template, beyond the current use of the
# process. Real templates take some MB.
TEMPLATE_BYTES = 2 << 30


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block after `seconds` of CPU time of this process.

    The limit works on the main thread only, because Python runs signal handlers there. On other
    threads there is no limit. A single call into C is not interrupted unless it checks for signals,
    as `re` does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not finished after {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Raise MemoryError inside the block if this process needs `more` bytes beyond its current use.

    The limit applies to the address space, so to all threads. Without /proc (macOS) there is no
    limit.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounds = [pages * resource.getpagesize() + more]
    bounds += [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    try:
        resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


REGEX = "re:"
# CPU seconds for matching all patterns of a list with all names: a total, and a part for each
# pattern. A sound pattern takes a microsecond per name.
MOST_SECONDS, SECONDS_EACH = 2.0, 0.001
# Exceptions of `re` for an invalid pattern: wrong syntax, a count that is too large, deep nesting.
REFUSED = (re.error, OverflowError, RecursionError)


@lru_cache(maxsize=1 << 16)
def expression(text: str) -> re.Pattern[str] | str:
    """Compile a regular expression, once for each text.

    If it is invalid, the error message is returned instead.
    """
    try:
        return re.compile(text)
    except REFUSED as error:
        return str(error)


class Patterns(tuple[str, ...]):
    """Names and `re:` patterns in their order. A plain name is found without trying any pattern.

    The time that the patterns may take in total is `seconds`.
    """

    names: frozenset[str]
    expressions: tuple[re.Pattern[str], ...]
    seconds: float

    def __new__(cls, entries: Iterable[str] = ()) -> "Patterns":
        patterns = super().__new__(cls, entries)
        patterns.names = frozenset(entry for entry in patterns if not entry.startswith(REGEX))
        made = (expression(entry[len(REGEX) :]) for entry in patterns if entry.startswith(REGEX))
        patterns.expressions = tuple(each for each in made if not isinstance(each, str))
        patterns.seconds = MOST_SECONDS + SECONDS_EACH * len(patterns.expressions)
        return patterns

    def match(self, name: str) -> bool:
        """Return True if `name` is listed, or if a pattern matches it from its start, as in vLLM.

        An invalid expression matches nothing.

        Raises:
            InputError: If the expressions have taken too long for all names so far. On other
            threads than the main thread, this is only detected between two names: Python sends
            signals to the main thread.
        """
        if name in self.names:
            return True
        if not self.expressions:
            return False
        start, each = time.thread_time(), self.expressions[0]
        try:
            if self.seconds <= 0:
                raise TimeoutError
            with time_limit(self.seconds):
                for each in self.expressions:
                    if each.match(name) is not None:
                        return True
        except TimeoutError:
            where = f"the pattern {clip(REGEX + each.pattern, 120)}"
            raise InputError.of(
                rules.SLOW_PATTERN, where, seconds=MOST_SECONDS, name=clip(name, 80)
            ) from None
        finally:
            self.seconds -= time.thread_time() - start
        return False


@lru_cache(maxsize=1 << 16)
def _single_pattern(pattern: str) -> Patterns:
    return Patterns((pattern,))


def matches(pattern: str, name: str) -> bool:
    """Return True if a name equals a pattern, or if an `re:` pattern matches it.

    Raises:
        InputError: If the pattern takes too long, as in `Patterns.match`.
    """
    return pattern == name or (pattern.startswith(REGEX) and _single_pattern(pattern).match(name))
