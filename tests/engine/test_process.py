"""The process group: nothing of it is left, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
