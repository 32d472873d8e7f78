"""A worker in its own process group that cannot outlive us: progress on a pipe, its output in a log."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from vexport.records import OnProgress

PROGRESS_FD = "VEXPORT_PROGRESS_FD"
_POLL_SECONDS, _GRACE_SECONDS = 0.1, 1.0
# Of a killed process, which may wait for a driver or a disk.
_KILLED_SECONDS = 30.0
_PIPE_BYTES = 1 << 16


# Waits for the end of a started command and returns its exit code, negative for a signal.
Follow = Callable[[OnProgress], int]


@contextmanager
def started_group(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, timeout: float
) -> Iterator[Follow]:
    """Start a command in its own process group, which is gone when the context ends, however that ends.

    Its stdout and stderr go to `log`; lines of JSON on the descriptor named in $VEXPORT_PROGRESS_FD go to
    `on_progress` of what is yielded. Its stdin closes when this process dies, however it dies. TimeoutError
    `timeout` seconds after the start.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as pipe, log.open("wb") as output:
        deadline = time.monotonic() + timeout
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
            yield partial(_follow, process, pipe.fileno(), deadline)
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask the group to end, then kill what is left of it and see it gone."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        _signal_until_gone(process, signal.SIGTERM, _GRACE_SECONDS)
    finally:
        _signal_until_gone(process, signal.SIGKILL, _KILLED_SECONDS)


def _signal_until_gone(process: subprocess.Popen[bytes], number: int, seconds: float) -> None:
    """Send a signal to a group, and wait some seconds for the end of all of it."""
    deadline = time.monotonic() + seconds
    with suppress(ProcessLookupError, PermissionError):  # there is none of ours left
        os.killpg(process.pid, number)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)


def _follow(process: subprocess.Popen[bytes], pipe: int, deadline: float, on_progress: OnProgress) -> int:
    """Pass progress on until the process has ended; or TimeoutError."""
    pending = b""
    os.set_blocking(pipe, False)
    while True:
        code = process.poll()
        with suppress(BlockingIOError):
            pending = _pass_on(pending + os.read(pipe, _PIPE_BYTES), on_progress)
        if code is not None:
            return code
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_POLL_SECONDS)


def _pass_on(text: bytes, on_progress: OnProgress) -> bytes:
    """Tell of the whole lines that are progress; what is left of the text where it may become a line."""
    *lines, rest = text.split(b"\n")
    for line in lines:
        try:
            stage, done, total = json.loads(line)
            progress = str(stage), int(done), int(total)
        except (ValueError, TypeError, RecursionError):  # a library that writes into any descriptor
            continue
        on_progress(*progress)
    return rest if len(rest) <= _PIPE_BYTES else b""
