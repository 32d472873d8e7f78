"""A disk or a server that fails while a source is read: one line with the file, nothing published."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quantize.test_streaming import digests, write_model

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc for the library that fails reads"),
]
# Of the reads of a source: the first is of a header, the last copies weights that stay as they are.
MOMENTS = (0, 1, 12)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that stands between Python and the C library."""
    library = tmp_path_factory.mktemp("shim") / "failing_reads.so"
    source = Path(__file__).with_name("failing_reads.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def vexport(*arguments: object, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vexport", *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE], ids=["EIO", "ESTALE"])
def test_a_read_that_fails_is_one_line_and_the_next_call_completes(
    error: int, shim: Path, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "source", hidden=64, layers=2)
    command = ("quantize", source, tmp_path / "out", "--scheme", "W8A8", "--quiet")
    failing = {"LD_PRELOAD": str(shim), "FAILING": str(source), "ERRNO": str(error)}
    failed = 0
    for moment in MOMENTS:
        ran = vexport(*command, environment={**failing, "COUNT": str(moment)})
        if ran.returncode:
            failed += 1
            (line,) = ran.stderr.splitlines()
            assert ran.returncode == 4, line
            assert line.startswith("error: ")
            assert str(source) in line
            assert os.strerror(error) in line
            assert not (tmp_path / "out").exists()
    assert failed >= 2
    assert vexport(*command[:2], tmp_path / "whole", *command[3:], environment={}).returncode == 0
    if not (tmp_path / "out").exists():
        assert vexport(*command, environment={}).returncode == 0
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_check_of_several_answers_for_those_that_can_be_read(
    shim: Path, llama: Path, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "source", hidden=64, layers=1)
    failing = {"LD_PRELOAD": str(shim), "FAILING": str(source), "ERRNO": str(errno.EIO), "COUNT": "0"}
    ran = vexport("check", llama, source, "--format", "json", environment=failing)
    assert ran.returncode == 4
    assert ran.stdout.count('"checkpoint"') == 2
    assert os.strerror(errno.EIO) in ran.stderr
