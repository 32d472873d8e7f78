"""Mapped files that become shorter while they are read.

The error is one line with the file's name.
"""

import mmap
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest

from tests.command import ROOT
from tests.forked import command, start
from tests.models import Good

# Reads two mapped files in two threads, which wait for each other. Both files become shorter.
THREADS = """
import mmap, os, sys
from threading import Barrier, Thread
import numpy as np
from pathlib import Path
from vexport.bus_errors import watch_for_cuts
barrier = Barrier(2)
def read(name):
    with open(name, "rb") as stream:
        watch_for_cuts(Path(name))
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    barrier.wait()
    os.truncate(name, 100)
    barrier.wait()
    print(np.frombuffer(mapped, np.uint8).sum())
threads = [Thread(target=read, args=(name,)) for name in sys.argv[1:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
# Sums a mapped file in threads that Python did not start.
FOREIGN_THREADS = """
import mmap, os, sys
import torch
from pathlib import Path
from vexport.bus_errors import watch_for_cuts
watch_for_cuts(Path(sys.argv[1]))
torch.set_num_threads(4)
with open(sys.argv[1], "rb") as stream:
    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
values = torch.frombuffer(mapped, dtype=torch.uint8)
os.truncate(sys.argv[1], 3_000_000)  # drops the last of four parts
print(values.to(torch.float32).sum())
"""
# A program with a handler, which vexport's handler must not replace.
OTHER_HANDLER = """
import faulthandler, mmap, os, sys
faulthandler.enable()
from pathlib import Path
from vexport.bus_errors import watch_for_cuts
watch_for_cuts(Path(sys.argv[1]))
with open(sys.argv[1], "rb") as stream:
    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate(sys.argv[1], 100)
print(mapped[50_000])
"""
# Reads a page that the file does not have.
BEHIND_THE_END = """
import mmap, os, sys
from pathlib import Path
from vexport.bus_errors import watch_for_cuts
os.truncate(sys.argv[1], 50_000)
with open(sys.argv[1], "rb") as stream:
    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate(sys.argv[1], 100)
watch_for_cuts(Path(sys.argv[1]))
print(mapped[40_000])
"""


def run_with_cut(victim: Path, *arguments: object) -> None:
    """Run a vexport command. The file `victim` becomes shorter when it is mapped."""
    status = victim.stat()

    class Cut(mmap.mmap):
        def __new__(cls, descriptor: int, length: int, **options: int) -> Self:
            mapped = super().__new__(cls, descriptor, length, **options)
            if os.path.samestat(os.fstat(descriptor), status):
                os.truncate(victim, 5000)
            return mapped

    mmap.mmap = Cut  # type: ignore[misc, assignment]
    command(*arguments)


def run(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def errors(ran: "subprocess.CompletedProcess[str]") -> list[str]:
    return [line for line in ran.stderr.splitlines() if line.startswith("error: ")]


def file_of(folder: Path, name: str, size: int = 400_000) -> Path:
    file = folder / name
    file.write_bytes(b"1" * size)
    return file


@pytest.mark.parametrize(
    "case", ["quantize", "check", "check --source", "repair", "repair --source"]
)
def test_truncated_file_is_one_line(case: str, good: Good, llama: Path, tmp_path: Path) -> None:
    source, quantized, out = tmp_path / "source", tmp_path / "quantized", tmp_path / "out"
    shutil.copytree(llama, source)
    shutil.copytree(good("W4A16"), quantized)
    cases: dict[str, tuple[Path, tuple[object, ...]]] = {
        "quantize": (source, (source, out, "--scheme", "NVFP4A16", "--no-verify")),
        "check": (quantized, (quantized, "--static")),
        "check --source": (source, (quantized, "--static", "--source", source)),
        "repair": (quantized, (quantized, out)),
        "repair --source": (source, (quantized, out, "--source", source)),
    }
    folder, options = cases[case]
    (weights,) = folder.glob("*.safetensors")
    log = tmp_path / "log"
    process = start(log, run_with_cut, weights, case.split()[0], *options, "--quiet")
    process.join(100)
    (line,) = log.read_text().splitlines()
    assert process.exitcode == 2, line
    assert line.startswith(f"error: {weights}: ")
    assert "shorter" in line
    assert "run the command again" in line
    assert not out.exists()


def test_two_threads_print_one_line(tmp_path: Path) -> None:
    files = [file_of(tmp_path, name) for name in ("one.safetensors", "two files.safetensors")]
    for _ in range(3):
        ran = run(THREADS, *files)
        (line,) = ran.stderr.splitlines()
        assert (ran.returncode, ran.stdout) == (2, "")
        assert any(line.startswith(f"error: {file}: ") for file in files)
        for file in files:
            file.write_bytes(b"1" * 400_000)


@pytest.mark.slow
def test_threads_of_other_libraries(tmp_path: Path) -> None:
    file = file_of(tmp_path, "model.safetensors", 4_000_000)
    ran = run(FOREIGN_THREADS, file)
    (line,) = errors(ran)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert line.startswith(f"error: {file}: ")


def test_handler_of_caller_is_kept(tmp_path: Path) -> None:
    ran = run(OTHER_HANDLER, file_of(tmp_path, "model.safetensors"))
    assert ran.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in ran.stderr


def test_other_bus_errors_are_environment_faults(tmp_path: Path) -> None:
    """The page is behind the end of the file from the start, as if the disk had lost it."""
    ran = run(BEHIND_THE_END, file_of(tmp_path, "model.safetensors", 100))
    (line,) = ran.stderr.splitlines()
    assert ran.returncode == 4
    assert "disk" in line
