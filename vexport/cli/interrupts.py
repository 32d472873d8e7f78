"""Signals that end a command: one line and exit code 130 or 143, within seconds, wherever the command is.

Loaded before anything else of vexport, so that imports are covered: only what is quick to load stands here.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from vexport.cli import INTERRUPTED

# What shells and schedulers send, and the exit code of each.
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
# After these seconds the process ends wherever it is: in a kernel that does not return, in foreign code.
PATIENCE_SECONDS = 2.5
# How often it is looked whether the exception still travels.
_LOOK_SECONDS = 0.05
# Commands that keep what they have done.
RESUMING = frozenset(("compare", "eval", "quantize", "run"))
FINISHED = "Interrupted after the command had finished"


class Interrupts:
    """The handlers while a command runs: the first signal raises KeyboardInterrupt, further ones nothing.

    Python ignores exceptions in callbacks and destructors, and imports may catch all of them: where the
    exception is lost, it is raised again. While a module is imported that may be written in C++, which an
    exception would abort, it waits.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self._finishing = self._again = False
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._reader, self._writer = -1, -1
        self._descriptor_before = -1
        self._ignored_before = sys.unraisablehook

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # Python's handlers wait for the main thread; the byte in this pipe does not.
        self._descriptor_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()
        sys.unraisablehook = self._ignored
        for number in CODES:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *details: object) -> None:
        self.finish()
        if self._writer < 0:
            return
        signal.set_wakeup_fd(self._descriptor_before)
        sys.unraisablehook = self._ignored_before
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._writer)  # which ends the thread

    def finish(self) -> None:
        """The command has ended, one way or the other: nothing is raised any more."""
        self._finishing = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._finishing:
            self.code = self.code or CODES[signal.Signals(number)]
        elif self.code is None or self._again:
            self.code, self._again = self.code or CODES[signal.Signals(number)], False
            if not _imports(frame):
                raise KeyboardInterrupt

    def _ignored(self, problem: "sys.UnraisableHookArgs") -> None:
        """Python's report of an exception that it ignores, but not of ours: it comes again."""
        if not isinstance(problem.exc_value, KeyboardInterrupt):
            self._ignored_before(problem)

    def _watch(self) -> None:
        """Raise again what was lost; end the process if it has not ended some time after a signal."""
        while received := os.read(self._reader, 1):
            if (code := CODES.get(signal.Signals(received[0]))) is not None:
                deadline = time.monotonic() + PATIENCE_SECONDS
                while time.monotonic() < deadline:
                    time.sleep(_LOOK_SECONDS)
                    if self.code is not None and not self._finishing and not _interrupt_travels():
                        self._again = True
                        signal.pthread_kill(threading.main_thread().ident or 0, received[0])
                os.write(2, f"error: {_interrupted()}\n".encode())
                os._exit(code)
        os.close(self._reader)


def _interrupted() -> str:
    """What is said of a command that a signal ended."""
    name = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    return f"{INTERRUPTED} to resume" if name in RESUMING else INTERRUPTED


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being made: what its own lines call, `torch._C._c10d_init`, may be C++."""
    code = frame.f_code if frame else None
    return code is not None and (
        code.co_name == "<module>" or code.co_filename.startswith("<frozen importlib")
    )


def _interrupt_travels() -> bool:
    """Whether the main thread is in a handler of KeyboardInterrupt: cleaning up on the way out."""
    handled = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = handled[1] if isinstance(handled, tuple) else handled
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def run() -> int:
    """Import and run the command line with the handlers in place, and return its exit code."""
    with Interrupts() as interrupts:
        return _run(interrupts)


def run_to_exit() -> NoReturn:
    """Run the command line; the process ends with the handlers in place."""
    open_closed_streams()
    with Interrupts() as interrupts:
        code = _run(interrupts)
        # Not sys.exit: Python ends by SIGINT where the exception passed code that was made from text, as
        # dataclasses make it while they are imported; and what is loaded takes long to be taken apart.
        os._exit(code)


def open_closed_streams() -> None:
    """Point what a caller closed of stdin, stdout and stderr to nowhere.

    Otherwise the first files that are opened get their numbers, and what C code prints goes into them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the lowest number that is free
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115, PTH123


def _run(interrupts: Interrupts) -> int:
    """The exit code of the command that was called; what it printed has left this process."""
    code: int | None = None
    try:
        from vexport.cli.entry import run_command

        code = run_command(lambda: interrupts.code is not None)
        interrupts.finish()
    # As long as the exception is handled it is not lost: before the block ends, nothing may be raised again.
    except KeyboardInterrupt:
        interrupts.finish()
    except Exception:  # of an import that a signal broke off; Python's own report of any other
        interrupts.finish()
        if interrupts.code is None:
            raise
    with suppress(OSError, ValueError):
        if interrupts.code is not None or code is None:
            print(f"error: {_interrupted() if code is None else FINISHED}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    return interrupts.code or (CODES[signal.SIGINT] if code is None else code)
