"""Processes that a session started and that left its group: found by a mark in their environment."""

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


def end_strays(mark: str, spare: int = 0) -> None:
    """Kill every process that has the mark and is not of the group `spare`, as long as any is left."""
    while strays := [process for process in _marked(mark) if os.getpgid(process) != spare]:
        for process in strays:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


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


def _marked(mark: str) -> Iterator[int]:
    """A process that has ended has an empty environment, another person's cannot be read."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)
