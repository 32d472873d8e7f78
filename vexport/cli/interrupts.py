"""Signals that end a command: one line and exit code 130 or 143, within seconds, wherever the command is.

Loaded before anything else of vexport, so that imports are covered: only what is quick to load stands here.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

# What shells and schedulers send, and the exit code of each.
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
# After these seconds the process ends wherever it is: in a kernel, in an import that swallowed the exception.
PATIENCE_SECONDS = 2.5
INTERRUPTED = "Interrupted. Run the same command again to resume"


class Interrupts:
    """The handlers while a command runs: the first signal raises KeyboardInterrupt, further ones nothing."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._reader, self._writer = -1, -1
        self._descriptor_before = -1

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # Python's handlers wait for the main thread; the byte in this pipe does not.
        self._descriptor_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()
        for number in CODES:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *details: object) -> None:
        if self._writer < 0:
            return
        signal.set_wakeup_fd(self._descriptor_before)
        if self.code is None:
            for number, handler in self._before.items():
                signal.signal(number, handler)
        os.close(self._writer)  # which ends the thread

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.code is None:
            self.code = CODES[signal.Signals(number)]
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """End the process if it has not ended some time after a signal."""
        while received := os.read(self._reader, 1):
            if (code := CODES.get(signal.Signals(received[0]))) is not None:
                threading.Event().wait(PATIENCE_SECONDS)
                os.write(2, f"error: {INTERRUPTED}\n".encode())
                os._exit(code)
        os.close(self._reader)


def main() -> None:
    """The console script: import and run the command line with the handlers in place."""
    interrupts, code = Interrupts(), CODES[signal.SIGINT]
    try:
        with interrupts:
            from vexport.cli.entry import run_command

            code = run_command()
    except KeyboardInterrupt:
        os.write(2, f"error: {INTERRUPTED}\n".encode())
    if interrupts.code is not None and code == CODES[signal.SIGINT]:
        # Not sys.exit: Python ends by SIGINT where the exception passed code that was made from text, as
        # dataclasses make it while they are imported.
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(interrupts.code)
    sys.exit(code)
