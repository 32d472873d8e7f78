"""Reads a worker's log and exit code: whose fault, and in which of vLLM's words."""

import os
import re
import shutil
import signal
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from vexport.engine.messages import EngineFailure, FailureKind
from vexport.errors.extras import is_disk, is_memory, is_mismatch

TAIL_LINES = 40
# Of a log of any size, the end is read; of a line of any length, the beginning.
_READ_BYTES = 4 << 20
_LONGEST_LINE = 4000
# The CPU build has fewer kernels and operators than the GPU builds: kernels/linear/__init__.py, and fewer
# for experts: fused_moe/oracle.
_NO_CPU_KERNEL = re.compile(
    r"Failed to find a kernel|_C::\w+\(\)|'_C\w*' object has no attribute|not implemented for 'CPU"
    r"|No .*MoE backend supports the deployment configuration"
)
# What torch.compile says where it finds no C++ compiler: torch/_inductor/exc.py, cpp_builder.py.
_NO_COMPILER = re.compile(
    r"InvalidCxxCompiler|No working C\+\+ compiler|CppCompileError|Failed to find C compiler"
)
# vLLM's messages that hide the exception of a process further down; that one is in the log.
_WRAPPER = re.compile(r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError")
# The operating system's out-of-memory killer ends a process with SIGKILL.
_KILLED_CORE = re.compile(r"Failed core proc\(s\): .*: -9\b")
# Whatever its exit code, if vLLM has learned one: a core that refuses a checkpoint says why in the log.
_SILENT_CORE = re.compile(r"Failed core proc\(s\): ")
# Bytes that a log needs for its last words.
_LOG_ROOM = 1 << 16
_PREFIX = re.compile(r"^\([^)]*pid=\d+\)\s*|^(?:ERROR|WARNING|INFO|CRITICAL) \S+ \S+ \[[^\]]*\]\s*")
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)(?: \S+)?: \S")
# One without a message, which the line of code before it in the traceback explains.
_BARE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)$")
# Last words in C++ and C, which Python does not hear.
_LAST_WORDS = re.compile(
    r"^terminate called after throwing an instance of|^libgomp: |^Fatal Python error: .*[Mm]emory"
)
# Signals whose cause is seldom a mistake in the code.
_MEANT: Mapping[int, str] = {signal.SIGBUS: ": /dev/shm is full, or a file was cut while it was read"}
_MARKS = re.compile(r"^\s*[~^]+$")


def log_tail(log: Path) -> str:
    """The last lines of a log that may not exist."""
    return "\n".join(_lines(log)[-TAIL_LINES:])


def last_exception(log: Path) -> str | None:
    """The last line of the log that names an exception, other than vLLM's wrappers around another."""
    exception, code = None, ""
    for line in _lines(log):
        if _LAST_WORDS.match(line) or _EXCEPTION.match(line) and not _WRAPPER.search(line):
            exception = line
        elif _BARE.match(line):
            exception = f"{line}: {code}"
        elif not _MARKS.match(line):
            code = line.strip()
    return exception


def one_line(error: BaseException) -> str:
    """An exception as one line; of one without a message the line of code that raised it."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {text or (frames[-1].line if frames else '')}"


def explain(failure: EngineFailure, log: Path, *, platform: str) -> EngineFailure:
    """The worker's failure with its root cause and the end of its log.

    What looks like a refusal but is the platform's fault becomes "out of memory" or "unsupported".
    """
    message = failure.message
    cause = last_exception(log) if _WRAPPER.search(message) else None
    message = cause or message
    kind: FailureKind = "crashed" if cause is None and _SILENT_CORE.search(message) else failure.kind
    if is_memory(message) or _KILLED_CORE.search(failure.message):
        kind = "out of memory"
    elif is_disk(message):
        kind = "no space"
    elif is_mismatch(message):
        kind = "mismatched build"
    elif _NO_COMPILER.search(message):
        kind = "no compiler"
    elif kind in ("refused", "crashed") and platform == "cpu" and _NO_CPU_KERNEL.search(message):
        kind = "unsupported"
    return replace(failure, kind=kind, message=message, log_tail=log_tail(log))


def failure_from_exit(log: Path, code: int) -> EngineFailure:
    """The worker ended with `code` (negative: a signal) and left no result."""
    cause = last_exception(log)
    message = f"the worker ended with {_ending(code)}" + (f" after {cause}" if cause else "")
    kind: FailureKind = "mismatched build" if is_mismatch(message) else "crashed"
    if code == -signal.SIGKILL or is_memory(message) or _KILLED_CORE.search(message):
        kind = "out of memory"
    elif is_disk(message) or code > 0 and _is_full(log):
        kind = "no space"
    return EngineFailure(kind=kind, message=message, log_tail=log_tail(log))


def _is_full(log: Path) -> bool:
    """Return whether the disk of the log has no room, so that it may lack what was said."""
    free = shutil.disk_usage(log.parent).free if log.parent.is_dir() else _LOG_ROOM
    return free < _LOG_ROOM


def _ending(code: int) -> str:
    """`signal 11 (SIGSEGV)` or `exit code 1`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name}{_MEANT.get(-code, '')})"
    except ValueError:  # one of those for real time
        return f"signal {-code}"


def _lines(log: Path) -> list[str]:
    """The end of the log without the process and logger prefixes that vLLM puts before each line."""
    if not log.is_file():
        return []
    with log.open("rb") as stream:
        stream.seek(-min(log.stat().st_size, _READ_BYTES), os.SEEK_END)
        text = stream.read(_READ_BYTES).decode(errors="replace")
    return [_strip(line[:_LONGEST_LINE]) for line in text.splitlines()]


def _strip(line: str) -> str:
    while (stripped := _PREFIX.sub("", line)) != line:
        line = stripped
    return line.rstrip()
