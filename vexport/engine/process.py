"""A child process in its own group that cannot outlive us: progress on a pipe, its output in a log."""

import json
import math
import os
import re
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from vexport.engine.shared_memory import remove_segments, segments_of
from vexport.engine.strays import MARK, OWNER, end_strays
from vexport.types import OnProgress

PROGRESS_FD = "VEXPORT_PROGRESS_FD"
# The folders that a session makes: of requests and results, of logs.
SESSION_FOLDER = "vexport-session-"
TEMPORARY = re.compile(r"vexport-(session|load|dry|arguments|tasks)-[a-z0-9_]{8}")
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 1.0
# Of a worker that has its result, to end; and of a killed process, which may wait for a driver or a disk.
_LAST_SECONDS, _KILLED_SECONDS = 20.0, 30.0
_LONGEST_LINE = 1 << 16
# What a worker tells is bounded: a library that writes into any descriptor may have met ours.
_LONGEST_STAGE, _MOST_STAGES = 300, 1000
# A log is begun again where it has more: some library may print without end.
_LOG_BYTES = 64 << 20
_BEGUN_AGAIN = b"[vexport: the log had more than 64 MiB and was begun again]\n"


class Leader(Protocol):
    """The first process of a group, as subprocess.Popen has it."""

    @property
    def pid(self) -> int:
        """Its number, and that of its group."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """Our end of its stdin."""

    def poll(self) -> int | None:
        """Its exit code if it has ended, negative for a signal."""


# (environment, descriptor of the log, descriptor for progress): starts a process that leads its own group.
Start = Callable[[Mapping[str, str], int, int], Leader]


def spawned(command: Sequence[str]) -> Start:
    """Starts `command` as a new process."""

    def start(environment: Mapping[str, str], log: int, progress: int) -> Leader:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, PROGRESS_FD: str(progress)},
            pass_fds=(progress,),
            start_new_session=True,
        )

    return start


def run_group(
    start: Start,
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout: float,
    on_progress: OnProgress,
    is_done: Callable[[], bool] = lambda: False,
) -> int:
    """Run what `start` starts to its end; return its exit code, negative for a signal, as subprocess does.

    Its stdout and stderr go to `log`; lines of JSON on the descriptor named in $VEXPORT_PROGRESS_FD go to
    `on_progress`. Its stdin is a pipe that closes when this process dies, however it dies.
    The whole group is gone when this returns or raises, what left the group too, and its shared memory.
    The log has at most 64 MiB: the beginning of a longer one goes.
    TimeoutError after `timeout` seconds. Once it `is_done` it has some seconds to end: an engine that is torn
    down waits for threads, devices and other processes.
    """
    mark = secrets.token_hex(8)
    segments: set[str] = set()
    stages: set[str] = set()

    def relay(stage: str, done: int, total: int) -> None:
        if stage not in stages:
            if len(stages) == _MOST_STAGES:
                return
            stages.add(stage)
            segments.update(segments_of(process.pid))
        on_progress(stage, done, total)

    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    reader, writer = os.pipe()
    with log.open("ab", buffering=0) as sink, os.fdopen(reader, "rb", buffering=0) as pipe:
        try:
            process = start({**environment, MARK: mark, OWNER: str(os.getpid())}, sink.fileno(), writer)
        finally:
            os.close(writer)
        try:
            _relay(process, pipe.fileno(), time.monotonic() + timeout, relay, sink, is_done)
        finally:
            segments |= segments_of(process.pid)
            end_group(process)
            end_strays(mark, os.fstat(sink.fileno()))
            remove_segments(segments)
    code = process.poll()
    return -signal.SIGKILL if code is None else code


def end_group(process: Leader) -> None:
    """Ask the group to end, then kill what is left of it and see it gone."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        _signal(process.pid, signal.SIGTERM)
        _await(lambda: not _alive(process), _GRACE_SECONDS)
    finally:
        _signal(process.pid, signal.SIGKILL)
        _await(lambda: process.poll() is not None, _KILLED_SECONDS)
    _await(lambda: not _alive(process), _GRACE_SECONDS)


def _relay(
    process: Leader,
    pipe: int,
    deadline: float,
    on_progress: OnProgress,
    log: IO[bytes],
    is_done: Callable[[], bool],
) -> None:
    """Pass progress on until the process has ended; a grandchild may hold the pipe open after that.

    TimeoutError at the deadline, also where the pipe is never empty. What is done needs not end.
    """
    pending, last = b"", math.inf
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            ended, now = process.poll() is not None, time.monotonic()
            if last == math.inf and is_done():
                last = now + _LAST_SECONDS
            if ended:
                deadline = min(deadline, now + _GRACE_SECONDS)
            elif now > last:
                return
            elif now > deadline and last == math.inf:
                raise TimeoutError
            _bound(log)
            chunk = os.read(pipe, 65536) if selector.select(0 if ended else _POLL_SECONDS) else None
            pending = _pass_on(pending + (chunk or b""), on_progress)
            if ended and (not chunk or now > deadline):
                return
            if chunk == b"":
                time.sleep(_POLL_SECONDS)


def _pass_on(text: bytes, on_progress: OnProgress) -> bytes:
    """Tell of the whole lines; what is left of the text unless it is too long for a line."""
    *lines, rest = text.split(b"\n")
    for line in lines:
        if (progress := _progress(line)) is not None:
            on_progress(*progress)
    return rest if len(rest) <= _LONGEST_LINE else b""


def _bound(log: IO[bytes]) -> None:
    """Begin a log again that has become too long; those who write to it append."""
    if os.fstat(log.fileno()).st_size > _LOG_BYTES:
        log.truncate(0)
        log.write(_BEGUN_AGAIN)


def _progress(line: bytes) -> tuple[str, int, int] | None:
    """What a line tells; None where it is not what a worker writes."""
    try:
        stage, done, total = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    whole = type(stage) is str and type(done) is int and type(total) is int
    return (stage, done, total) if whole and len(stage) <= _LONGEST_STAGE and stage.isprintable() else None


def _await(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for something, but not for long."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _alive(process: Leader) -> bool:
    """Whether any process of the group is left."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return
