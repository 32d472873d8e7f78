"""The command line. `main` is the console script, and `entry` defines the commands.

SIGINT and SIGTERM end a command with one line on stderr and exit code 130 or 143. Running the same
command again resumes from the files written so far.
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
# Seconds between a signal and the forced end of the process. The command ends its engines during
# this time.
PATIENCE_SECONDS = 5.0


def main() -> NoReturn:
    """Install the signal handlers, run the command, and exit the process.

    The exit skips Python's cleanup.
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
    except KeyboardInterrupt:  # before the handlers are installed, or after the command has ended
        end(INTERRUPTED, 130)


def end(error: str, code: int) -> NoReturn:
    """Write a line to stderr and exit the process at once. Safe in a signal handler or a thread."""
    os.write(2, f"error: {error}\n".encode())
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt in the main thread, and exit after `PATIENCE_SECONDS` at the latest.

    If the signal arrives during an import, exit at once. An exception in an import could make C++
    code abort. Nothing needs to be ended, because no engine runs yet.
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
