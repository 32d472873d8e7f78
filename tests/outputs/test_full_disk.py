"""A disk that is full, or gone, while a command writes: one line that names the place, and nothing lost."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT
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


@pytest.mark.slow
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
