"""Process groups. No process is left, no matter how the group ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vexport.engine.messages import SessionRequest, SessionResult
from vexport.engine.process import started_process_group
from vexport.files import from_json, to_json
from vexport.records import OnProgress, silent

# A child process that writes its process id and sleeps, ignoring SIGTERM. PARENT starts it.
CHILD = (
    "import os, pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
)
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}, sys.argv[1]])"
REPORTING = (
    "import os; fd = int(os.environ['VEXPORT_PROGRESS_FD']);"
    "os.write(fd, b'[\"load\", 0, 1]\\n[\"load\", '); os.write(fd, b'1, 1]\\n'); "
    "print('hello'); exit(7)"
)
# A worker that starts such a child, then writes into the pipe and the log without end.
FLOODING = (
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}, sys.argv[1]]);"
    "import os, threading; fd = int(os.environ['VEXPORT_PROGRESS_FD']);"
    "line = b'[\"' + b'x' * 70_000 + b'\", 0, 1]\\n[[[\\n[1,2,3]\\n';"
    "threading.Thread(target=lambda: [os.write(fd, line) for _ in iter(int, 1)], "
    "daemon=True).start();"
    "[os.write(1, b'a line\\n' * 1000) for _ in iter(int, 1)]"
)
# The real worker with an engine that hangs in C during its teardown. Its child ignores SIGTERM.
LINGERING = f"""
import ctypes, pathlib, subprocess, sys
from vexport.engine import worker
from vexport.engine.messages import SessionResult
request, result, note = map(pathlib.Path, sys.argv[1:])
def tear_down():
    subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(note)])
    while not (result.is_file() and note.exists() and note.read_text()):
        pass
    ctypes.PyDLL(None).sleep(60)
def run(request, report, ask, check, engine):
    engine.callback(tear_down)
    return SessionResult(checkpoint=request.checkpoint, platform="cpu", vllm="")
worker.run, worker._TEARDOWN_SECONDS = run, 2
worker.main(sys.argv[1:3], None, None)
"""


def run(log: Path, timeout: float, *command: str, progress: OnProgress = silent) -> int:
    with started_process_group(
        [sys.executable, "-c", *command], environment=os.environ, log=log, timeout=timeout
    ) as follow:
        return follow(progress)


def has_ended(pid: int) -> bool:
    """Return whether a process ends within 5 seconds. A zombie has ended."""
    status = Path(f"/proc/{pid}/status")
    for _ in range(100):
        if not status.exists() or "\nState:\tZ" in status.read_text():
            return True
        time.sleep(0.05)
    return False


def test_progress_and_log(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    log = tmp_path / "logs" / "log"
    code = run(log, 30, REPORTING, progress=lambda *progress: seen.append(progress))
    assert code == 7
    assert log.read_text() == "hello\n"
    assert seen == [("load", 0, 1), ("load", 1, 1)]


@pytest.mark.slow
def test_interrupt_ends_grandchildren(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"""
import os, signal, sys
from pathlib import Path
from vexport.engine.process import started_process_group
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
command = [sys.executable, "-c", {PARENT!r}, {str(note)!r}]
log = Path({str(tmp_path / "log")!r})
with started_process_group(command, environment=os.environ, log=log, timeout=100) as follow:
    follow(print)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    while not (note.exists() and note.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=50) != 0
    assert has_ended(int(note.read_text()))


@pytest.mark.slow
def test_timeout_ends_flood_and_grandchildren(tmp_path: Path) -> None:
    begin, note = time.monotonic(), tmp_path / "pid"
    with pytest.raises(TimeoutError):
        run(tmp_path / "log", 2, FLOODING, str(note))
    assert time.monotonic() - begin < 20
    assert has_ended(int(note.read_text()))


@pytest.mark.slow
def test_hanging_engine_ends_after_result(tmp_path: Path) -> None:
    request, result, note = (tmp_path / name for name in ("request.json", "result.json", "pid"))
    request.write_text(to_json(SessionRequest(checkpoint=tmp_path)))
    begin = time.monotonic()
    code = run(tmp_path / "log", 50, LINGERING, str(request), str(result), str(note))
    assert code == -signal.SIGALRM
    assert time.monotonic() - begin < 40
    assert from_json(SessionResult, result).platform == "cpu"
    assert has_ended(int(note.read_text()))
