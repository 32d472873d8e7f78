"""Bounds on the time of what may not end: a regular expression, a chat template."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

# Of the wall, or of this process' own time, whatever else runs.
Clock = Literal["wall", "processor"]
_TIMERS = {
    "wall": (signal.ITIMER_REAL, signal.SIGALRM),
    "processor": (signal.ITIMER_VIRTUAL, signal.SIGVTALRM),
}


# Of a chat template and a conversation; real ones take milliseconds.
TEMPLATE_SECONDS = 10.0


@contextmanager
def time_limit(seconds: float, clock: Clock) -> Iterator[None]:
    """Raise TimeoutError inside the block after so many seconds, of which there must be some.

    Only a main thread can be interrupted so (Python runs signal handlers there); on another one there is no
    bound. A single call in C is not interrupted, unless it looks for signals, as `re` does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not finished after {seconds:g} s")

    timer, number = _TIMERS[clock]
    before = signal.signal(number, stop)
    try:
        signal.setitimer(timer, seconds)
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
