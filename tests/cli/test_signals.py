"""SIGINT, SIGTERM and SIGHUP at any moment: one line, the right exit code, soon, and nothing left."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.quantize.test_streaming import write_model

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
# Three, and what a busy machine adds.
SOON = 6.0


def started(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "vexport", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def await_handlers(process: "subprocess.Popen[str]") -> None:
    """Until then it is Python that starts, and none of vexport's code."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        (caught,) = (line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGHUP - 1) & 1:
            return
        time.sleep(0.002)


def lines_of_error(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("error") or "Traceback" in line]


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_at_any_moment_is_one_line(number: signal.Signals, tmp_path: Path) -> None:
    """While imports run, before the first byte, in the middle; the same command then completes."""
    source = write_model(tmp_path / "source", hidden=1024, layers=4)
    command = ("quantize", source, tmp_path / "out", "--scheme", "W8A8", "--quiet")
    moments = random.Random(int(number))
    for delay in (0.0, moments.uniform(0, 0.3), moments.uniform(0.3, 1.5)):
        process = started(*command)
        await_handlers(process)
        time.sleep(delay)
        sent = time.perf_counter()
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
        if process.returncode == 0:  # it was quicker
            break
        assert process.returncode == CODES[number], stderr
        assert time.perf_counter() - sent < SOON
        assert lines_of_error(stderr) == ["error: Interrupted. Run the same command again to resume"]
    else:
        process = started(*command)
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_many_signals_are_as_one(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", hidden=1024, layers=4)
    process = started("quantize", source, tmp_path / "out", "--scheme", "W8A8")
    await_handlers(process)
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    _, stderr = process.communicate(timeout=30)
    if process.returncode == 0:  # it was quicker
        assert (tmp_path / "out" / "config.json").is_file()
        return
    assert process.returncode == 130
    assert lines_of_error(stderr) == ["error: Interrupted. Run the same command again to resume"]


def test_a_command_that_hears_nothing_ends_all_the_same() -> None:
    """Python code waits for what runs in C, or may be deaf: the process is ended."""
    code = (
        "import ctypes\n"
        "from vexport.cli.interrupts import Interrupts\n"
        "with Interrupts():\n"
        "    libc = ctypes.CDLL(None)\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        while True:\n"
        "            libc.usleep(999_999)\n"
        "    except KeyboardInterrupt:\n"
        "        while True:\n"
        "            libc.usleep(999_999)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=SOON + 4)
    assert (process.returncode, stderr.count("Interrupted")) == (143, 1)
