"""A worker in its own process group that cannot outlive us: progress on a pipe, its output in a log."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

from vexport.types import OnProgress

PROGRESS_FD = "VEXPORT_PROGRESS_FD"
_POLL_SECONDS, _GRACE_SECONDS = 0.1, 1.0
# Of a worker that has its result, to end; and of a killed process, which may wait for a driver or a disk.
_LAST_SECONDS, _KILLED_SECONDS = 20.0, 30.0
_LONGEST_LINE = 1 << 16


def run_group(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout: float,
    on_progress: OnProgress,
    is_done: Callable[[], bool] = lambda: False,
) -> int:
    """Run a command to its end; return its exit code, negative for a signal, as subprocess does.

    Its stdout and stderr go to `log`; lines of JSON on the descriptor named in $VEXPORT_PROGRESS_FD go to
    `on_progress`. Its stdin closes when this process dies, however it dies. The whole group is gone when this
    returns or raises. TimeoutError after `timeout` seconds. Once it `is_done` it has some seconds to end: an
    engine that is torn down waits for threads, devices and other processes.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    progress = Thread(target=_pass_on, args=(reader, on_progress), daemon=True)
    progress.start()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, PROGRESS_FD: str(writer)},
                pass_fds=(writer,),
                start_new_session=True,
            )
        finally:
            os.close(writer)
        try:
            _await_result(process, time.monotonic() + timeout, is_done)
        finally:
            end_group(process)
    progress.join(_GRACE_SECONDS)  # what left the group may hold the pipe open
    code = process.poll()
    return -signal.SIGKILL if code is None else code


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask the group to end, then kill what is left of it and see it gone."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        _signal(process.pid, signal.SIGTERM)
        _await_end(process, _GRACE_SECONDS)
    finally:
        _signal(process.pid, signal.SIGKILL)
        _await_end(process, _KILLED_SECONDS)


def _await_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (process.poll() is None or _signal(process.pid, 0)):
        time.sleep(0.05)


def _signal(group: int, number: int) -> bool:
    """Whether there is such a group of ours to get the signal."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _await_result(process: subprocess.Popen[bytes], deadline: float, is_done: Callable[[], bool]) -> None:
    """Return when the process has ended, or had its time to once it was done; or raise TimeoutError."""
    while process.poll() is None:
        if is_done():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_SECONDS)
            return
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_POLL_SECONDS)


def _pass_on(reader: int, on_progress: OnProgress) -> None:
    """Tell of the lines that are progress: a library may write into any descriptor."""
    with os.fdopen(reader, "rb") as pipe:
        while line := pipe.readline(_LONGEST_LINE):
            with suppress(ValueError, TypeError, RecursionError):
                stage, done, total = json.loads(line)
                on_progress(str(stage), int(done), int(total))
