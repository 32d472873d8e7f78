"""A disk that is full, or gone, while a command writes: one line that names the place, and nothing lost."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.striking import RESUME
from tests.outputs.test_separate import tree
from tests.packaging.environment import ROOT
from tests.quantize.test_streaming import digests, write_model

WORDS = ("--scheme", "W8A8", "--quiet", "--max-shard-size", "1MB")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source", hidden=512, layers=2)


def quantize(source: Path, out: Path, *, largest: int | None = None) -> tuple[int, str]:
    """In a process of its own, whose files the system cuts at `largest` bytes (EFBIG, as a quota does)."""

    def limit() -> None:
        if largest is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    ran = subprocess.run(
        [sys.executable, "-B", "-m", "vexport", "quantize", source, out, *WORDS],
        preexec_fn=limit,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stderr


@pytest.mark.parametrize("largest", [0, 100, 300_000])
def test_a_quota_is_one_line_and_the_next_call_completes(largest: int, source: Path, tmp_path: Path) -> None:
    """At the first byte, in the record or a header, in the middle of a shard."""
    code, errors = quantize(source, tmp_path / "out", largest=largest)
    (line,) = errors.splitlines()
    assert code == 4, line
    assert str(tmp_path) in line
    assert not (tmp_path / "out").exists()
    assert quantize(source, tmp_path / "out") == (0, "")
    assert quantize(source, tmp_path / "whole") == (0, "")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 700 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root mounts file systems; the quota above is the same path")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_small_disk_is_one_line_and_the_next_call_completes(
    small_disk: Path, source: Path, tmp_path: Path
) -> None:
    code, errors = quantize(source, small_disk / "out")
    (line,) = errors.splitlines()
    assert (code, str(small_disk) in line) == (4, True), line
    assert not (small_disk / "out").exists()
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    assert quantize(source, small_disk / "out") == (0, "")
    assert quantize(source, tmp_path / "whole") == (0, "")
    whole, out = digests(tmp_path / "whole"), digests(small_disk / "out")
    assert {name for name in whole if whole[name] != out[name]} <= {"vexport.json"}  # which has the command


@pytest.mark.parametrize("command", ["check", "plan"])
def test_an_answer_that_cannot_be_written_is_one_line(command: str, source: Path) -> None:
    """To a device that is always full: the answer is not half there with exit code 0."""
    words = ("check", source) if command == "check" else ("plan", source, "--scheme", "W8A8")
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "vexport", *map(str, words)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.returncode == 4, ran.stderr
    assert "No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_output_that_vanishes_is_one_line(source: Path, tmp_path: Path) -> None:
    parent = tmp_path / "there"
    parent.mkdir()
    before = tree(source)
    process = subprocess.Popen(
        [sys.executable, "-m", "vexport", "quantize", source, parent / "out", *WORDS],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    work = parent / ".out.partial" / "new"
    while process.poll() is None and not work.exists():
        time.sleep(0.001)
    while process.poll() is None and parent.exists():
        shutil.rmtree(parent, ignore_errors=True)
    _, errors = process.communicate(timeout=60)
    (line,) = errors.splitlines()
    assert process.returncode in (2, 4), line
    assert str(parent) in line
    assert not parent.exists()
    assert tree(source) == before


def test_a_signal_ends_a_command_that_waits_for_a_file(source: Path, tmp_path: Path) -> None:
    """A pipe that nobody writes to."""
    os.mkfifo(tmp_path / "rows.jsonl")
    words = (
        "quantize",
        source,
        tmp_path / "out",
        "--scheme",
        "FP8",
        "--calibration",
        tmp_path / "rows.jsonl",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "vexport", *map(str, words), "--quiet"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    writer = None
    while writer is None and process.poll() is None:
        time.sleep(0.1)
        with suppress(OSError):  # until the command waits for the first byte
            writer = os.open(tmp_path / "rows.jsonl", os.O_WRONLY | os.O_NONBLOCK)
    assert writer is not None
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    os.close(writer)
    assert (process.returncode, errors.strip()) == (143, RESUME)
    assert time.monotonic() - start < 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "source"]
