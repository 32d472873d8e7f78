"""The process group: nothing of it is left, however it ends."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from vexport.engine import process, worker
from vexport.engine.messages import SessionRequest, SessionResult
from vexport.engine.process import started_group
from vexport.files import to_json
from vexport.types import OnProgress, silent

# A worker with a child of its own; the child writes its process id and sleeps, deaf to SIGTERM.
CHILD = (
    "import os, pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
)
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}, sys.argv[1]])"
REPORTING = (
    "import os; fd = int(os.environ['VEXPORT_PROGRESS_FD']);"
    "os.write(fd, b'[\"load\", 0, 1]\\n[\"load\", '); os.write(fd, b'1, 1]\\n'); print('hello'); exit(7)"
)


# Writes into the pipe and the log without end.
FLOODING = (
    "import os, threading; fd = int(os.environ['VEXPORT_PROGRESS_FD']);"
    "line = b'[\"' + b'x' * 70_000 + b'\", 0, 1]\\n[[[\\n[1,2,3]\\n';"
    "threading.Thread(target=lambda: [os.write(fd, line) for _ in iter(int, 1)], daemon=True).start();"
    "[os.write(1, b'a line\\n' * 1000) for _ in iter(int, 1)]"
)
# Has its result and never ends: it floods, listens to nothing, and so does the child that left its group.
LINGERING = f"""
import pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note, result = map(pathlib.Path, sys.argv[1:])
subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(note)])
while not (note.exists() and note.read_text()):
    pass
result.write_text("all answers")
{FLOODING}
"""


def run(
    log: Path, timeout: float, *command: str, progress: OnProgress = silent, result: Path | None = None
) -> int:
    """The exit code of a script with its arguments; `result` is the file with which it is done."""
    with started_group(
        [sys.executable, "-c", *command], environment=os.environ, log=log, timeout=timeout
    ) as follow:
        return follow(progress, result.is_file if result else lambda: False)


def gone(pid: int) -> bool:
    """Whether a process has ended; an orphan's zombie counts as ended."""
    status = Path(f"/proc/{pid}/status")
    for _ in range(100):
        if not status.exists() or "\nState:\tZ" in status.read_text():
            return True
        time.sleep(0.05)
    return False


def test_progress_and_log_arrive(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    log = tmp_path / "logs" / "log"
    code = run(log, 30, REPORTING, progress=lambda *progress: seen.append(progress))
    assert code == 7
    assert log.read_text() == "hello\n"
    assert seen == [("load", 0, 1), ("load", 1, 1)]


def test_timeout_ends_grandchildren(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pytest.raises(TimeoutError):
        run(tmp_path / "log", 2, PARENT, str(note))
    assert gone(int(note.read_text()))


def test_interrupt_ends_grandchildren(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"""
import os, signal, sys
from pathlib import Path
from vexport.engine.process import started_group
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
command = [sys.executable, "-c", {PARENT!r}, {str(note)!r}]
log = Path({str(tmp_path / "log")!r})
with started_group(command, environment=os.environ, log=log, timeout=100) as follow:
    follow(print)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    while not (note.exists() and note.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=50) != 0
    assert gone(int(note.read_text()))


def test_a_flood_ends_at_the_timeout(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        run(tmp_path / "log", 0.5, FLOODING)
    assert time.monotonic() - begin < 20


def test_what_is_done_needs_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_LAST_SECONDS", 0.2)
    monkeypatch.setattr(process, "_GRACE_SECONDS", 0.2)
    note, result = tmp_path / "pid", tmp_path / "result"
    begin = time.monotonic()
    code = run(tmp_path / "log", 30, LINGERING, str(note), str(result), result=result)
    assert code == -signal.SIGKILL
    assert time.monotonic() - begin < 10
    assert gone(int(note.read_text()))


def test_a_result_is_written_before_the_engine_is_torn_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, result = tmp_path / "request.json", tmp_path / "result.json"
    seen: list[bool] = []

    def run(request: SessionRequest, report: object, tasks: object, engine: ExitStack) -> SessionResult:
        engine.callback(lambda: seen.append(result.is_file()))
        return SessionResult(name="", checkpoint=request.checkpoint, platform="cpu", vllm="")

    monkeypatch.setattr(worker, "run", run)
    monkeypatch.setattr(worker, "end_with_parent", lambda: None)
    request.write_text(to_json(SessionRequest(name="", checkpoint=tmp_path)))
    assert worker.main([str(request), str(result)]) == 0
    assert seen == [True]
