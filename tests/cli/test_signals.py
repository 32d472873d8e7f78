"""SIGINT and SIGTERM at any moment: one line, an exit code, soon, nothing left; the same call goes on."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.striking import CODES, RESUME, Struck, strike
from tests.command import ROOT
from tests.quantize.test_streaming import write_model

# Three, and what a busy machine adds.
SOON = 20.0
MODEL = ROOT / "scenarios" / "demo" / "model"


def assert_interrupted(struck: Struck, number: signal.Signals) -> None:
    assert struck.left == []
    assert (struck.code, struck.errors) == (CODES[number], [RESUME]), struck
    assert struck.seconds < SOON


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_at_any_moment_is_one_line(number: signal.Signals, tmp_path: Path) -> None:
    """In the imports, in the middle, and five at once; the same command then completes."""
    source = write_model(tmp_path / "source", hidden=1024, layers=4)
    command = ("quantize", source, tmp_path / "out", "--scheme", "W8A8", "--quiet")
    moments = random.Random(int(number))
    for delay, times in ((0.0, 5), (moments.uniform(0, 0.3), 1), (moments.uniform(0.3, 1.5), 1)):
        struck = strike(command, number, delay, folder=tmp_path, times=times)
        if struck.code or struck.errors:  # else it was quicker than the signal
            assert_interrupted(struck, number)
    if not (tmp_path / "out").exists():
        again = [sys.executable, "-m", "vexport", *map(str, command)]
        assert subprocess.run(again, capture_output=True, timeout=60, check=False).returncode == 0
    assert (tmp_path / "out" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.slow
def test_what_hears_nothing_ends_all_the_same() -> None:
    """Python cleans up without an end: the process is ended."""
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
    _, stderr = process.communicate(timeout=SOON)
    assert (process.returncode, stderr.splitlines()) == (143, [RESUME])


@pytest.mark.vllm
def test_a_signal_while_vllm_is_imported(tmp_path: Path) -> None:
    """The worker, what it has started and its folders go too."""
    moments = random.Random("dry")
    number = moments.choice(list(CODES))
    command = ("load", "--dry", MODEL)
    assert_interrupted(strike(command, number, moments.uniform(1, 4), folder=tmp_path), number)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_signal_while_vllm_loads_a_model(tmp_path: Path) -> None:
    """The reference, another process, goes too."""
    struck = strike(("load", MODEL), signal.SIGINT, 0.02, folder=tmp_path, until="load model: load ...")
    assert_interrupted(struck, signal.SIGINT)
