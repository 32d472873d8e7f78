"""The process group: nothing of it is left, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vexport.engine import process
from vexport.engine.process import run_group, spawned
from vexport.types import silent

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
    "line = b'[\"\\\\u001b[2J\", 0, 1]\\n[\"' + b'x' * 70_000 + b'\", 0, 1]\\n[[[\\n[1,2,3]\\n';"
    "threading.Thread(target=lambda: [os.write(fd, line) for _ in iter(int, 1)], daemon=True).start();"
    "[os.write(1, b'a line\\n' * 1000) for _ in iter(int, 1)]"
)
# Leaves a child with a group and an environment that are not the session's, deaf to SIGTERM.
LEAVING = (
    "import pathlib, subprocess, sys, time\n"
    f"subprocess.Popen([sys.executable, '-c', {CHILD!r}, sys.argv[1]], start_new_session=True, env={{}})\n"
    "note = pathlib.Path(sys.argv[1])\n"
    "while not (note.exists() and note.read_text()):\n"
    "    time.sleep(0.02)\n"
)


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
    code = run_group(
        spawned([sys.executable, "-c", REPORTING]),
        environment=os.environ,
        log=tmp_path / "logs" / "log",
        timeout=30,
        on_progress=lambda *progress: seen.append(progress),
    )
    assert code == 7
    assert (tmp_path / "logs" / "log").read_text() == "hello\n"
    assert seen == [("load", 0, 1), ("load", 1, 1)]


def test_timeout_ends_grandchildren(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pytest.raises(TimeoutError):
        run_group(
            spawned([sys.executable, "-c", PARENT, str(note)]),
            environment=os.environ,
            log=tmp_path / "log",
            timeout=2,
            on_progress=silent,
        )
    assert gone(int(note.read_text()))


def test_interrupt_ends_grandchildren(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = (
        "import os, signal, sys; from pathlib import Path;"
        "from vexport.engine.process import run_group, spawned;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a shell ignores it in the background
        f"run_group(spawned([sys.executable, '-c', {PARENT!r}, {str(note)!r}]), environment=os.environ,"
        f"log=Path({str(tmp_path / 'log')!r}), timeout=100, on_progress=print)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    while not (note.exists() and note.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=50) != 0
    assert gone(int(note.read_text()))


@pytest.mark.fault("an engine that floods its log and vexport's pipe: both bounded, ended at its timeout")
def test_a_flood_is_bounded_and_ends_at_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_LOG_BYTES", 1 << 20)
    seen: list[tuple[str, int, int]] = []
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        run_group(
            spawned([sys.executable, "-c", FLOODING]),
            environment=os.environ,
            log=tmp_path / "log",
            timeout=0.5,
            on_progress=lambda *progress: seen.append(progress),
        )
    assert time.monotonic() - begin < 5
    assert seen == []
    log = (tmp_path / "log").read_bytes()
    assert b"[vexport: the log had more than" in log
    assert b"\0" not in log


@pytest.mark.fault("an engine that leaves a child without its environment: ended with the session")
def test_a_child_without_the_environment_is_found_by_the_log(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = run_group(
        spawned([sys.executable, "-c", LEAVING, str(note)]),
        environment=os.environ,
        log=tmp_path / "log",
        timeout=30,
        on_progress=silent,
    )
    assert code == 0
    assert gone(int(note.read_text()))
