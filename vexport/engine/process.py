"""Run a worker in a process group that ends with this process.

The worker reports progress through a pipe, and writes its output to a log. If it fails, the cause
is derived from the log and the exit code, with vLLM's message if the log contains one.
"""

import json
import os
import re
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from vexport.engine.messages import EngineFailure, FailureKind
from vexport.errors.extras import is_disk, is_memory, is_mismatch
from vexport.records import OnProgress

PROGRESS_FD = "VEXPORT_PROGRESS_FD"
_POLL_SECONDS, _GRACE_SECONDS = 0.1, 1.0
# Time limit for the end of a killed process. The process may wait for a driver or a disk.
_KILLED_SECONDS = 30.0
_PIPE_BYTES = 1 << 16
# Function that waits for the end of a started command and returns its exit code, negative for
# a signal.
Follow = Callable[[OnProgress], int]
TAIL_LINES = 40
# Only the end of a long log is read, and only the beginning of a long line.
_READ_BYTES = 4 << 20
_LONGEST_LINE = 4000
# vLLM's messages about kernels that a CPU lacks. The CPU build has fewer kernels and operators than
# the GPU builds (kernels/linear/__init__.py), and fewer kernels for experts (fused_moe/oracle).
# Some messages are about kernels that need a newer CPU, such as "FP8 KV cache on CPU requires x86
# with AVX-512 or AMX" (v1/attention/backends/cpu_attn.py).
_NO_CPU_KERNEL = re.compile(
    r"Failed to find a kernel|_C::\w+\(\)|'_C\w*' object has no attribute|not implemented for 'CPU"
    r"|No .*MoE backend supports the deployment configuration|Unsupported .*MoE backend: NONE"
    r"|\bon CPU\b.*\brequires?\b|\b(requires?|supported)\b.*\bon CPU\b"
    r"|\bCPU(_ATTN)?\b[\w ]* (requires|only supports|does not support|doesn't support)\b"
)
# torch.compile's messages if there is no C++ compiler: torch/_inductor/exc.py, cpp_builder.py.
_NO_COMPILER = re.compile(
    r"InvalidCxxCompiler|No working C\+\+ compiler|CppCompileError|Failed to find C compiler"
)
# Python's messages about a module that is not installed, or that fails while it is imported.
_NO_PACKAGE = re.compile(r"(?:\w+\.)*(?:ModuleNotFoundError|ImportError): ")
# vLLM's messages that hide the exception of another process. The log contains this exception.
_WRAPPER = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError"
    r"|failed to be inspected"  # a model's class cannot be imported
)
# The operating system's out-of-memory killer ends a process with SIGKILL.
_KILLED_CORE = re.compile(r"Failed core proc\(s\): .*: -9\b")
# vLLM's message if its core process ends, with the exit code if it is known. A core that refuses a
# checkpoint writes an exception to the log. Without this exception, the core has crashed.
_SILENT_CORE = re.compile(r"Failed core proc\(s\): ")
_PREFIX = re.compile(
    r"^(?:\([^)]*pid=\d+\)\s*|(?:ERROR|WARNING|INFO|CRITICAL) \S+ \S+ \[[^\]]*\]\s*)+"
)
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)(?: \S+)?: \S")
# An exception without a message. The source line above it in the traceback explains it.
_EXCEPTION_WITHOUT_MESSAGE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)$")
# Messages of C++ and C at a crash, which Python does not see.
_CRASH_MESSAGE = re.compile(
    r"^terminate called after throwing an instance of|^libgomp: |^Fatal Python error: .*[Mm]emory"
)
# Signals that are rarely caused by a mistake in the code.
_SIGNAL_HINTS: Mapping[int, str] = {
    signal.SIGBUS: ": /dev/shm is full, or a file was truncated while it was read"
}
_MARKS = re.compile(r"^\s*[~^]+$")
_ENVIRONMENT: tuple[tuple[Callable[[str], object], FailureKind], ...] = (
    (is_memory, "out of memory"),
    (is_disk, "no space"),
    (is_mismatch, "mismatched build"),
    (_NO_COMPILER.search, "no compiler"),
    (_NO_PACKAGE.match, "no package"),
)


@contextmanager
def started_process_group(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, timeout: float
) -> Iterator[Follow]:
    """Start a command in a separate process group, which has ended when the context ends.

    Its stdout and stderr go to `log`. It can write lines of JSON to the descriptor in
    $VEXPORT_PROGRESS_FD. The yielded function passes them to its `on_progress`. The command's stdin
    closes when this process dies, even if it is killed.

    The yielded function raises TimeoutError `timeout` seconds after the start.
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
            yield partial(_wait_with_progress, process, pipe.fileno(), deadline)
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        _signal_until_gone(process, signal.SIGTERM, _GRACE_SECONDS)
    finally:
        _signal_until_gone(process, signal.SIGKILL, _KILLED_SECONDS)


def _signal_until_gone(process: subprocess.Popen[bytes], number: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with suppress(ProcessLookupError, PermissionError):  # no process of the group is left
        os.killpg(process.pid, number)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)


def _wait_with_progress(
    process: subprocess.Popen[bytes], pipe: int, deadline: float, on_progress: OnProgress
) -> int:
    """Pass progress on until the process has ended. Raises TimeoutError after `deadline`."""
    pending = b""
    os.set_blocking(pipe, False)
    while True:
        code = process.poll()
        with suppress(BlockingIOError):
            pending = _forward_progress(pending + os.read(pipe, _PIPE_BYTES), on_progress)
        if code is not None:
            return code
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_POLL_SECONDS)


def _forward_progress(text: bytes, on_progress: OnProgress) -> bytes:
    """Report the complete lines that are progress.

    Return the rest of the text, which may become a line.
    """
    *lines, rest = text.split(b"\n")
    for line in lines:
        try:
            stage, done, total = json.loads(line)
            progress = str(stage), int(done), int(total)
        except (ValueError, TypeError, RecursionError):  # output of a library
            continue
        on_progress(*progress)
    return rest if len(rest) <= _PIPE_BYTES else b""


def log_tail(log: Path) -> str:
    """Return the last lines of a log, or "" if the log does not exist."""
    return "\n".join(_lines(log)[-TAIL_LINES:])


def last_exception(log: Path) -> str | None:
    """Return the last line of the log that names an exception.

    Exceptions that vLLM wraps around other exceptions are ignored.
    """
    exception, code = None, ""
    for line in _lines(log):
        if _CRASH_MESSAGE.match(line) or _EXCEPTION.match(line) and not _WRAPPER.search(line):
            exception = line
        elif _EXCEPTION_WITHOUT_MESSAGE.match(line):
            exception = f"{line}: {code}"
        elif not _MARKS.match(line):
            code = line.strip()
    return exception


def one_line(error: BaseException) -> str:
    """Return an exception as one line, with the source code that raised it if it has no message."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {text or (frames[-1].line if frames else '')}"


def explain(failure: EngineFailure, log: Path, *, platform: str) -> EngineFailure:
    """Return the worker's failure with its root cause and the end of its log.

    If the root cause is not the checkpoint, a refusal gets another kind, such as "out of memory",
    "unsupported" or "crashed".
    """
    cause = last_exception(log) if _WRAPPER.search(failure.message) else None
    message = cause or failure.message
    kind: FailureKind = (
        "crashed" if cause is None and _SILENT_CORE.search(message) else failure.kind
    )
    if kind in ("refused", "crashed") and platform == "cpu" and _NO_CPU_KERNEL.search(message):
        kind = "unsupported"
    kind = "out of memory" if _KILLED_CORE.search(failure.message) else _kind(message, kind)
    return replace(failure, kind=kind, message=message, log_tail=log_tail(log))


def failure_from_exit(log: Path, code: int) -> EngineFailure:
    """Return the failure of a worker that ended with `code` and left no result.

    A negative `code` is a signal.
    """
    cause = last_exception(log)
    ending = f"exit code {code}"
    if code < 0:
        ending = f"signal {-code} ({signal.Signals(-code).name}{_SIGNAL_HINTS.get(-code, '')})"
    message = f"the worker ended with {ending}" + (f" after {cause}" if cause else "")
    killed = code == -signal.SIGKILL or _KILLED_CORE.search(message)
    named = _kind(message, _kind(cause or "", "crashed"))
    kind: FailureKind = "out of memory" if killed else named
    return EngineFailure(kind=kind, message=message, log_tail=log_tail(log))


def _kind(message: str, other: FailureKind) -> FailureKind:
    return next((kind for is_about, kind in _ENVIRONMENT if is_about(message)), other)


def _lines(log: Path) -> list[str]:
    if not log.is_file():
        return []
    with log.open("rb") as stream:
        stream.seek(-min(log.stat().st_size, _READ_BYTES), os.SEEK_END)
        text = stream.read(_READ_BYTES).decode(errors="replace")
    return [_PREFIX.sub("", line[:_LONGEST_LINE]).rstrip() for line in text.splitlines()]
