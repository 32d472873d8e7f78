"""A worker in its own process group that cannot outlive us: progress on a pipe, its output in a log."""

import importlib
import json
import math
import multiprocessing
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from vexport.types import OnProgress

PROGRESS_FD = "VEXPORT_PROGRESS_FD"
_POLL_SECONDS, _GRACE_SECONDS = 0.2, 1.0
# Of a worker that has its result, to end; and of a killed process, which may wait for a driver or a disk.
_LAST_SECONDS, _KILLED_SECONDS = 20.0, 30.0
_LONGEST_LINE = 1 << 16
# What the fork server imports at its start: vLLM, 8 s of CPU.
_PRELOADED = ["vexport.engine.preloaded"]


class Leader(NamedTuple):
    """The first process of a group: its number, and what tells its exit code once it has ended."""

    pid: int
    poll: Callable[[], int | None]


# (environment, log, stdin, progress): starts a process that leads its own group.
Start = Callable[[Mapping[str, str], Path, Connection, Connection], Leader]


def spawned(command: Sequence[str]) -> Start:
    """Starts `command` as a new process."""

    def start(environment: Mapping[str, str], log: Path, stdin: Connection, progress: Connection) -> Leader:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=stdin.fileno(),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, PROGRESS_FD: str(progress.fileno())},
                pass_fds=(progress.fileno(),),
                start_new_session=True,
            )
        return Leader(process.pid, process.poll)

    return start


def forked(module: str, arguments: Sequence[str]) -> Start:
    """Starts `python -m module arguments` as a fork of a server that has imported vLLM."""

    def start(environment: Mapping[str, str], log: Path, stdin: Connection, progress: Connection) -> Leader:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        job = (module, [*arguments], {**environment, "PWD": str(Path.cwd())}, str(log), stdin, progress)
        process = context.Process(target=_work, args=job)
        process.start()
        assert process.pid is not None
        return Leader(process.pid, lambda: process.exitcode)

    return start


def _work(
    module: str, arguments: list[str], environment: Mapping[str, str], log: str, *pipes: Connection
) -> None:
    """What a fork does: become like the process that `spawned` would have started, and end as it would."""
    stdin, progress = pipes
    os.setsid()
    with Path(log).open("ab") as output:
        for source, target in ((stdin.fileno(), 0), (output.fileno(), 1), (output.fileno(), 2)):
            os.dup2(source, target)
    os.environ.clear()
    os.environ.update({**environment, PROGRESS_FD: str(progress.fileno())})
    os.chdir(environment["PWD"])
    tempfile.tempdir = None  # TMPDIR is another one
    sys.argv, sys.path[0] = [module, *arguments], environment["PWD"]
    try:
        code = int(importlib.import_module(module).main(arguments))
    except Exception:
        traceback.print_exc()
        code = 1
    sys.exit(code)


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
    `on_progress`. Its stdin closes when this process dies, however it dies. The whole group is gone when this
    returns or raises. TimeoutError after `timeout` seconds. Once it `is_done` it has some seconds to end: an
    engine that is torn down waits for threads, devices and other processes.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    (reader, progress), (stdin, owner) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
    with reader, owner:
        with progress, stdin:
            process = start(environment, log, stdin, progress)
        try:
            _follow(process, reader.fileno(), time.monotonic() + timeout, on_progress, is_done)
        finally:
            owner.close()
            end_group(process)
    code = process.poll()
    return -signal.SIGKILL if code is None else code


def end_group(process: Leader) -> None:
    """Ask the group to end, then kill what is left of it and see it gone."""
    try:
        _signal(process.pid, signal.SIGTERM)
        _await_end(process, _GRACE_SECONDS)
    finally:
        _signal(process.pid, signal.SIGKILL)
        _await_end(process, _KILLED_SECONDS)


def _await_end(process: Leader, seconds: float) -> None:
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


def _follow(
    process: Leader, pipe: int, deadline: float, on_progress: OnProgress, is_done: Callable[[], bool]
) -> None:
    """Pass progress on until the process has ended; a grandchild may hold the pipe open after that."""
    pending, last = b"", math.inf
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            ended, now = process.poll() is not None, time.monotonic()
            if last == math.inf and (ended or is_done()):
                last = now + (_GRACE_SECONDS if ended else _LAST_SECONDS)
            if now > last:
                return
            if now > deadline and last == math.inf:
                raise TimeoutError
            chunk = os.read(pipe, 65536) if selector.select(0 if ended else _POLL_SECONDS) else None
            pending = _pass_on(pending + (chunk or b""), on_progress)
            if ended and not chunk:
                return
            if chunk == b"":
                time.sleep(_POLL_SECONDS)


def _pass_on(text: bytes, on_progress: OnProgress) -> bytes:
    """Tell of the whole lines that are progress; what is left of the text where it may become a line."""
    *lines, rest = text.split(b"\n")
    for line in lines:
        try:
            stage, done, total = json.loads(line)
            on_progress(str(stage), int(done), int(total))
        except (ValueError, TypeError, RecursionError):  # a library that writes into any descriptor
            continue
    return rest if len(rest) <= _LONGEST_LINE else b""
