"""Reads that a disk or server does not answer: an end with a name in the place of a wait without end.

The kernel waits for a hard-mounted NFS server as long as it takes, in a read as in a fault of a mapped page.
Whoever waits there can only be killed: a thread that waits for nothing sees it, and ends the process. The
command line starts it; a program that calls vexport.api decides for itself.
"""

import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from threading import Thread

from vexport.errors import EnvironmentFault
from vexport.types.time_limit import seconds_of

# Seconds that one read may take, by this variable.
TIMEOUT, DEFAULT_TIMEOUT = "VEXPORT_READ_TIMEOUT", 300.0
# Between two looks: of looks, not of time, so that a stopped process is not taken for a waiting one.
LOOK_SECONDS = 1.0
_TASKS = Path("/proc/self/task")
MAPS, _SHARD = Path("/proc/self/maps"), ".safetensors"


@cache
def end_stalled_reads() -> None:
    """Watch this process's threads from now on: one that waits for a disk for TIMEOUT ends it with code 4."""
    timeout = seconds_of(TIMEOUT, DEFAULT_TIMEOUT)
    if _TASKS.exists():
        Thread(target=_watch, args=(timeout,), name="reads", daemon=True).start()


def _watch(timeout: float) -> None:
    looks: dict[tuple[str, str], int] = {}
    while True:
        time.sleep(LOOK_SECONDS)
        looks = {wait: looks.get(wait, 0) + 1 for wait in _waits()}
        if max(looks.values(), default=0) * LOOK_SECONDS > timeout:
            _end(timeout)


def _waits() -> list[tuple[str, str]]:
    """The threads that wait for a disk, each with how often it has waited: another number in another wait."""
    found = []
    for task in _TASKS.iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        values = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if values["State"].startswith("D"):
            found.append((task.name, values["voluntary_ctxt_switches"]))
    return found


def _end(timeout: float) -> None:
    folders = sorted({str(file.parent) for file in mapped_shards()})
    error = EnvironmentFault(
        ", ".join(folders) or "the headers of weights",
        got=f"a read that the disk or server has not answered for {timeout:g} s",
        need="an answer",
        fix=f"run the same command again when it answers, to resume, or raise {TIMEOUT} (seconds)",
    )
    os.write(2, f"error: {error}\n".encode())
    os._exit(error.exit_code)


def mapped_shards() -> Mapping[Path, int]:
    """The shards that this process maps, and up to which byte."""
    found: dict[Path, int] = {}
    for line in MAPS.read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].endswith(_SHARD):
            continue
        start, stop = (int(part, 16) for part in fields[0].split("-"))
        path, end = Path(fields[5]), int(fields[2], 16) + stop - start
        found[path] = max(found.get(path, 0), end)
    return found
