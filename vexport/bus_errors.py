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
from pathlib import Path
from threading import Lock
from typing import NoReturn

from vexport.errors import EnvironmentFault, InputError, VexportError, visible

_MAPS = Path("/proc/self/maps")
# A line break in a name, as the system writes it, and the ending for a deleted file.
_LINE_BREAK, _DELETED = r"\012", " (deleted)"
# From the headers of Linux on 64-bit machines: signal.h, asm-generic/siginfo.h, and glibc's
# bits/sigaction.h.
_SA_SIGINFO = 4
_SIGNAL_SET_BYTES = 128
_ADDRESS_OFFSET = 16
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
# Acquired by the first thread that fails, and never released. Other threads wait until the process
# ends.
_ending = Lock()


class _Action(ctypes.Structure):
    """Mirror of the C library's `struct sigaction`."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("blocked", ctypes.c_byte * _SIGNAL_SET_BYTES),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def install_bus_error_handler() -> None:
    """Install the SIGBUS handler for this process, before a file is mapped.

    Further calls change nothing. A handler that was installed before, such as Python's
    faulthandler, is left in place.
    """
    library = ctypes.CDLL(None)
    present = _Action()
    library.sigaction(signal.SIGBUS, None, ctypes.byref(present))
    if present.handler is None:  # SIG_DFL
        library.sigaction(signal.SIGBUS, ctypes.byref(_OURS), None)


def _end(number: int, information: int, context: int) -> NoReturn:
    """Write the error for the lost page to stderr, and end the process with its exit code."""
    _ending.acquire()
    code, text = EnvironmentFault.exit_code, "a mapped file cannot be read any more"
    try:
        problem = problem_at(ctypes.c_uint64.from_address(information + _ADDRESS_OFFSET).value)
        code, text = problem.exit_code, visible(str(problem))
    finally:  # the thread must not continue, even if this code fails
        os.write(2, f"error: {text}\n".encode(errors="replace"))
        os._exit(code)


_HANDLER = _Handler(_end)
_OURS = _Action(handler=ctypes.cast(_HANDLER, ctypes.c_void_p).value, flags=_SA_SIGINFO)


def problem_at(address: int) -> VexportError:
    """Return the error for an unreadable page in the memory of this process.

    If a file ends before the page, the input has changed (exit code 2). Everything else is a fault
    of the machine (exit code 4).
    """
    place = _mapped_place(address)
    if place is None:
        got, fix = "a part of the memory cannot be read", "check the machine's memory and disks"
        return EnvironmentFault("vexport", got=got, need="", fix=fix)
    file, position = place
    if _size(file) <= position:
        return InputError(
            file,
            got=f"a file that became shorter than {position + 1:,} bytes while it was read",
            need="a file that does not change while it is read",
            fix="run the command again while no other process writes to the file",
        )
    got = "a part of the file cannot be read: the disk failed, or another program wrote to the file"
    fix = "check the disk, and run the command again while no other process writes to the file"
    return EnvironmentFault(file, got=got, need="", fix=fix)


def _mapped_place(address: int) -> tuple[str, int] | None:
    """Return the file behind an address and the position in it, or None without a file.

    Source: the system's list of this process's mappings.
    """
    for line in _MAPS.read_text(encoding="utf-8", errors="surrogateescape").split("\n"):
        # start-end permissions offset device inode path
        fields = line.split(maxsplit=5)
        if len(fields) < 6:  # no file
            continue
        start, end = (int(part, 16) for part in fields[0].split("-"))
        if start <= address < end:
            file = fields[5].replace(_LINE_BREAK, "\n")
            return file.removesuffix(_DELETED), int(fields[2], 16) + address - start
    return None


def _size(file: str) -> float:
    """Return the size of a file, or infinity if it has no name any more."""
    try:
        return Path(file).stat().st_size
    except OSError:
        return float("inf")
