"""Processes that a session started and that left its group.

They are found by a mark in their environment, or, where they have another one, by the log that they print to.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "VEXPORT_SESSION"
# The process that started the session.
OWNER = "VEXPORT_SESSION_OWNER"
_LOOKS, _LOOK_SECONDS = 20, 0.05
# Of killed processes, to be gone: one may wait for a driver or a disk, or be another user's.
_STRAY_SECONDS = 5.0


def end_strays(mark: str, log: os.stat_result, spare: int = 0) -> None:
    """Kill every process of the session that is not of the group `spare`, as long as any is left.

    But not for ever: some cannot be killed.
    """
    deadline = time.monotonic() + _STRAY_SECONDS
    while strays := [process for process in _of_session(mark, log) if _group(process) != spare]:
        for process in strays:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            return


def has_ended(process: str) -> bool:
    """Whether a process ends now or has: its files are closed some moments before."""
    for _ in range(_LOOKS):
        try:
            state = (Path("/proc") / process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _of_session(mark: str, log: os.stat_result) -> Iterator[int]:
    """A process that has ended has an empty environment and no files, another person's cannot be read."""
    entry = f"{MARK}={mark}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry in (process / "environ").read_bytes().split(b"\0") or _prints_to(process, log):
                yield int(process.name)


def _prints_to(process: Path, log: os.stat_result) -> bool:
    """Whether the stdout or stderr of a process is the file."""
    if process.name == str(os.getpid()):
        return False
    for stream in ("1", "2"):
        with suppress(FileNotFoundError):
            if os.path.samestat((process / "fd" / stream).stat(), log):
                return True
    return False


def _group(process: int) -> int:
    """The group of a process; -1 where it has just ended."""
    with suppress(ProcessLookupError):
        return os.getpgid(process)
    return -1
