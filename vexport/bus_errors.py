"""End the process with a one-line error if a mapped file can no longer be read.

If another program truncates a mapped file or the disk fails, some mapped pages have no data any
more. The system sends SIGBUS to a thread that reads such a page. The thread cannot continue without
these values.

A handler of Python's module `signal` would not run. It waits for the end of the instruction, which
fails again and again. The handler here is called through ctypes at once, in the thread that failed.
It needs the interpreter's lock, which threads release while they compute on mapped weights.
"""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NoReturn

from vexport.errors import EnvironmentFault, InputError, VexportError, visible
from vexport.rules import file as rules
from vexport.rules.environment import MAPPED_FILE

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_SIGNAL = ctypes.CDLL(None).signal
_SIGNAL.argtypes, _SIGNAL.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
# Mapped files, with their sizes when they were opened.
_sizes: dict[Path, int] = {}
# Acquired by the first thread that fails, and never released. Other threads wait until the process
# ends.
_ending = Lock()


def watch_for_cuts(file: Path) -> None:
    """Handle SIGBUS in this process, before a file is mapped.

    A handler that was installed before, such as Python's faulthandler, is left in place.
    """
    _sizes[file] = file.stat().st_size
    ours = ctypes.cast(_HANDLER, ctypes.c_void_p).value
    present = _SIGNAL(signal.SIGBUS, ours)
    if present not in (None, ours):  # None is SIG_DFL
        _SIGNAL(signal.SIGBUS, present)


def _end(number: int) -> NoReturn:
    """Write the error to stderr, and end the process with its exit code."""
    _ending.acquire()
    code, text = EnvironmentFault.exit_code, "a mapped file cannot be read any more"
    try:
        problem = _problem()
        code, text = problem.exit_code, visible(str(problem))
    finally:  # the thread must not continue, even if this code fails
        os.write(2, f"error: {text}\n".encode(errors="replace"))
        os._exit(code)


_HANDLER = _Handler(_end)


def _problem() -> VexportError:
    """Return the error for a file that became shorter, or else for a fault of the machine."""
    for file, size in _sizes.items():
        with suppress(OSError):
            if file.stat().st_size < size:
                change = f"a file that became shorter than {size:,} bytes while it was read"
                return InputError.of(rules.CHANGED, str(file), change=change)
    return EnvironmentFault.of(MAPPED_FILE, "vexport")
