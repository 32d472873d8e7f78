"""The command line: one file a theme; `main` is the console script, `entry` has the commands.

SIGINT and SIGTERM end a command: one line, exit code 130 or 143; the same call goes on from what is
written.
"""

import os
import signal
import sys
from contextlib import suppress
from threading import Timer
from types import FrameType
from typing import NoReturn

INTERRUPTED = "Interrupted. Run the same command again to resume"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
# Seconds that a command has to end its engines before the process exits.
PATIENCE_SECONDS = 5.0


def main() -> NoReturn:
    """The console script: a command with the handlers in place, then the end, without cleaning
    up.
    """
    try:
        for number in CODES:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _interrupt)
        from vexport.cli import entry

        code = entry.run_command()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    except KeyboardInterrupt:  # before the handlers stand, or when the command has ended
        end(INTERRUPTED, 130)


def end(error: str, code: int) -> NoReturn:
    """End the process with a line on stderr, whatever state it is in."""
    os.write(2, f"error: {error}\n".encode())
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise in the main thread, but in an import, which C++ would abort: there is nothing to end
    there.
    """
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
