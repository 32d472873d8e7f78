"""SIGINT and SIGTERM at any moment.

The command prints one line, ends soon with its exit code, and leaves nothing. The same call
resumes.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.command import ROOT, vexport
from tests.quantize.test_streaming import write_model
from vexport import cli

# Seconds: three, and a reserve for a busy machine.
TIME_LIMIT = 20.0
MODEL = ROOT / "scenarios" / "demo" / "model"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
INTERRUPTED = f"error: {cli.INTERRUPTED}"


def send_signal_to(
    arguments: Sequence[object],
    number: signal.Signals,
    delay: float,
    *,
    folder: Path,
    until: str = "",
    times: int = 1,
) -> tuple[int, list[str]]:
    """Start `vexport ARGUMENTS...` in a folder, and send it a signal.

    The signal is sent `times` times, `delay` seconds after the command has installed its handlers.
    With `until`, the delay begins at a line on stderr that starts with this text.

    Return the command's exit code and errors. Check that it ends soon and leaves no process and no
    file in its TMPDIR.
    """
    with TemporaryDirectory(prefix="struck-") as temporary:
        process = subprocess.Popen(
            [sys.executable, "-m", "vexport", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": temporary},
            start_new_session=True,
        )
        await_handlers(process)
        assert process.stderr is not None
        lines = list[str]()
        while until and not (lines and lines[-1].startswith(until)):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        time.sleep(delay)
        sent = time.perf_counter()
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.01 if times > 1 else 0)
        _, stderr = process.communicate(timeout=60)
        assert time.perf_counter() - sent < TIME_LIMIT
        assert leftovers(Path(temporary)) == []
    errors = re.findall(
        "^error.*|.*(?:Traceback|Exception).*", "".join(lines) + stderr, re.MULTILINE
    )
    return process.returncode, errors


def await_handlers(process: "subprocess.Popen[str]") -> None:
    """Wait until the process handles SIGTERM.

    Before, Python is starting and no code of vexport runs.
    """
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        (caught,) = (line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.002)


def leftovers(temporary: Path) -> list[str]:
    """Return the processes that have the folder as TMPDIR, and the folder's files.

    torch's files for compilation are ignored.
    """
    mark = f"TMPDIR={temporary}".encode()
    left = [
        f"process {process}" for process in Path("/proc").glob("[0-9]*") if _begins(process, mark)
    ]
    files = sorted(path.name for path in temporary.iterdir())
    return left + [name for name in files if not name.startswith("torchinductor_")]


def _begins(process: Path, mark: bytes) -> bool:
    try:
        return any(
            entry.startswith(mark) for entry in (process / "environ").read_bytes().split(b"\0")
        )
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_signal_at_any_moment(number: signal.Signals, tmp_path: Path) -> None:
    """Send five signals during imports, then one later. After them, the same command completes."""
    source = write_model(tmp_path / "source", hidden=1024, layers=4)
    command = ("quantize", source, tmp_path / "out", "--scheme", "W8A8", "--quiet")
    for delay, times in ((0.0, 5), (random.Random(int(number)).uniform(0.3, 1.5), 1)):
        ended = send_signal_to(command, number, delay, folder=tmp_path, times=times)
        assert ended in ((CODES[number], [INTERRUPTED]), (0, []))  # (0, []) if it ended before
    if not (tmp_path / "out").exists():
        assert vexport(*command).code == 0
    assert (tmp_path / "out" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.slow
@pytest.mark.parametrize("call", [("list", "schemes"), ("check", "missing")])
def test_closed_output_is_no_verdict(call: tuple[str, ...]) -> None:
    """`vexport ... | head -1` has neither the exit code of PASS nor of FAIL.

    An error keeps its code, even if nobody reads its message.
    """
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "vexport", *call]
    ran = subprocess.run(command, stdout=writing, stderr=writing, cwd=ROOT)
    os.close(writing)
    assert ran.returncode == (141 if call[0] == "list" else 2)


def test_endless_cleanup_is_killed() -> None:
    """If cleaning up takes longer than PATIENCE_SECONDS, the process is ended."""
    code = (
        "import time\n"
        "from vexport import cli\n"
        "from vexport.cli import entry\n"
        "def command():\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        time.sleep(60)\n"
        "entry.run_command = command\n"
        "cli.PATIENCE_SECONDS = 0.5\n"
        "cli.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=TIME_LIMIT)
    assert (process.returncode, stderr.splitlines()) == (143, [INTERRUPTED])


@pytest.mark.vllm
def test_signal_during_vllm_import(tmp_path: Path) -> None:
    """The worker ends too, with its child processes and folders."""
    moments = random.Random("dry")
    number = moments.choice(list(CODES))
    command = ("load", "--dry", MODEL)
    ended = send_signal_to(command, number, moments.uniform(1, 4), folder=tmp_path)
    assert ended == (CODES[number], [INTERRUPTED])


@pytest.mark.vllm
@pytest.mark.slow
def test_signal_during_model_load(tmp_path: Path) -> None:
    """The process that computes the reference ends too."""
    ended = send_signal_to(
        ("load", MODEL), signal.SIGINT, 0.02, folder=tmp_path, until="load model: load ..."
    )
    assert ended == (130, [INTERRUPTED])
