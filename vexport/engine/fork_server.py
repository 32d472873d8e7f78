"""`python -m vexport.engine.fork_server LISTENER`: imports vLLM at the first request, then forks for each.

`vexport.engine.forks` starts it and asks it. LISTENER is the descriptor of a listening socket. It ends when
its stdin closes, that is with the process that started it.
"""

import atexit
import gc
import importlib
import json
import os
import selectors
import shutil
import socket
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from vexport.engine.process import PROGRESS_FD

_MOST_BYTES = 1 << 20
_DESCRIPTORS = 3
# What may differ from our own environment: nothing that vLLM or a library of its reads when it is imported.
_FREE_PREFIXES = ("VEXPORT_", "VLLM_CPU_", "PYTEST_", "_")
_FREE = {"PWD", "OLDPWD", "SHLVL", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A worker to become: its module, arguments, environment and folder."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str


def main(arguments: list[str]) -> int:
    """Serve until the owner is gone; a fork does its job and ends."""
    listener = socket.socket(fileno=int(arguments[0]))
    folder = Path(listener.getsockname()).parent
    job = _Server(listener).serve()
    if job is not None:
        _end(_do(job))
    shutil.rmtree(folder, ignore_errors=True)  # of an owner that was killed
    return 0


def _do(job: Job) -> int:
    sys.argv = [job.module, *job.arguments]
    sys.path[0] = job.folder
    try:
        return int(importlib.import_module(job.module).main(job.arguments))
    except Exception:
        traceback.print_exc()
        return 1


def _end(code: int) -> NoReturn:
    """End as forks of multiprocessing do: what is registered runs, modules are not taken apart (0.5 s)."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Server:
    """The sockets of those who wait for an answer, by the descriptor that tells of their process's end."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.environment = dict(os.environ)
        self.running: dict[int, tuple[int, socket.socket]] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self.selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> Job | None:
        """None when the owner is gone; in a fork, what it has to do."""
        while True:
            for key, _ in self.selector.select():
                if key.fd == 0:
                    return None
                if key.fd in self.running:
                    self._ended(key.fd)
                elif (job := self._answer(self.listener.accept()[0])) is not None:
                    return job

    def _answer(self, connection: socket.socket) -> Job | None:
        """Fork for a request; a request that cannot be met has its connection closed."""
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, _DESCRIPTORS)
        except OSError:
            connection.close()
            return None
        try:
            job = Job(**json.loads(data)) if data else None
            if job is None or not self._can_run(job):
                connection.close()
                return None
            return self._fork(job, connection, *descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _can_run(self, job: Job) -> bool:
        """Whether a fork would be like a new process: the imports succeed, in the same environment.

        A library that sets a variable when it is imported may have done so there and here.
        """
        try:
            importlib.import_module(job.module).preload()
        except Exception:  # a new process will say so in its own log
            traceback.print_exc()
            return False
        gc.freeze()
        other = [
            name
            for name in {*job.environment, *self.environment}
            if job.environment.get(name) not in (self.environment.get(name), os.environ.get(name))
            and not name.startswith(_FREE_PREFIXES)
            and name not in _FREE
        ]
        if other:
            print(f"{job.module} has another environment: {', '.join(sorted(other))}", flush=True)
        return not other

    def _fork(self, job: Job, connection: socket.socket, stdin: int, log: int, progress: int) -> Job | None:
        """In the fork the job; its process tells its own number once it leads its group."""
        sys.stdout.flush()
        sys.stderr.flush()
        if child := os.fork():
            watch = os.pidfd_open(child)
            self.running[watch] = (child, connection)
            self.selector.register(watch, selectors.EVENT_READ)
            return None
        os.setsid()
        for source, target in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update({**job.environment, PROGRESS_FD: str(os.dup(progress))})
        os.chdir(job.folder)
        tempfile.tempdir = None  # TMPDIR is another one
        connection.send(str(os.getpid()).encode())
        connection.close()
        self._close()
        return job

    def _ended(self, watch: int) -> None:
        """Tell the exit code, negative for a signal."""
        child, connection = self.running.pop(watch)
        self.selector.unregister(watch)
        os.close(watch)
        _, status = os.waitpid(child, 0)
        with connection:
            try:
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            except OSError:  # nobody waits for it any more
                return

    def _close(self) -> None:
        """What a fork has no use for."""
        self.selector.close()
        self.listener.close()
        for watch, (_, connection) in self.running.items():
            os.close(watch)
            connection.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
