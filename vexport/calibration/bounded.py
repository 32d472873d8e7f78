"""A bound on the time of what a checkpoint's own program does: its chat template, which may not end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 10.0
"""Of this process' time, whatever else runs. Real templates take milliseconds."""


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block after so many seconds of the processor.

    Only a main thread can be interrupted so (Python runs signal handlers there); on another one there is no
    bound. What a single call in C does is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not finished after {seconds:g} s")

    earlier = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)
