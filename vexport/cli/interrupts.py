"""Signals end a command: one line, exit code 130 or 143; the same call goes on from what is written."""

import os
import signal
import sys
from contextlib import suppress
from threading import Timer
from types import FrameType
from typing import NoReturn

from vexport.cli import INTERRUPTED, end

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
# Seconds in which a command ends its engines; then the process ends wherever it is.
PATIENCE_SECONDS = 5.0


def run() -> int:
    """Import and run the command line; its exit code."""
    from vexport.cli.entry import run_command

    return run_command()


def run_to_exit() -> NoReturn:
    """Run the command line with the handlers in place, and end the process without taking it apart."""
    for number in CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    code = run()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise in the main thread, but in an import, which C++ would abort: there is nothing to end there."""
    for each in CODES:
        signal.signal(each, signal.SIG_IGN)
    code = CODES[signal.Signals(number)]
    timer = Timer(PATIENCE_SECONDS, end, (INTERRUPTED, code))
    timer.daemon = True
    timer.start()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            end(INTERRUPTED, code)
        frame = frame.f_back
    raise KeyboardInterrupt(code)
