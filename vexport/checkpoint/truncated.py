"""Files that change while they are read: an error that names them, also where the kernel sends SIGBUS."""

import ctypes
import os
import signal
from functools import cache
from pathlib import Path

from vexport.checkpoint.stalled import MAPS, mapped_shards
from vexport.errors import EnvironmentFault, InputError, VexportError


def changed(file: Path, got: str) -> InputError:
    """The error for a file that is not what it was when its header was read."""
    return InputError(
        str(file),
        got=got,
        need="a file that stays the same while it is read",
        fix="run again when nothing else writes to it; nothing was published",
    )


@cache
def explain_bus_errors() -> None:
    """Make the end of a process that reads a mapped file beyond its new end one line and exit code 2.

    Where no file has become shorter, its disk or server failed (EIO, ESTALE): exit code 4.

    The signal comes in the middle of a read, in any thread, and returns to the same read: Python's own
    handlers, which run later, never would. Nothing is done where there is no /proc to name the file.
    """
    if MAPS.exists():
        ctypes.CDLL(None).signal(signal.SIGBUS, _HANDLER)


def _on_bus_error(number: int) -> None:
    files = ", ".join(str(file) for file in truncated_files())
    error: VexportError = changed(Path(files), "one that was cut while it was read")
    if not files:
        need, fix = "a working disk or network", "see dmesg, then run the same command again to resume"
        error = EnvironmentFault("weights", got="a read that failed", need=need, fix=fix)
    os.write(2, f"error: {error}\n".encode())
    os._exit(error.exit_code)


def truncated_files() -> list[Path]:
    """The shards that this process maps and that have become shorter than what it maps of them."""
    shorter: dict[Path, None] = {}
    for path, end in mapped_shards().items():
        size = path.stat().st_size if path.exists() else 0
        if size <= end - os.sysconf("SC_PAGESIZE"):
            shorter[path] = None
    return list(shorter)


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(_on_bus_error)
