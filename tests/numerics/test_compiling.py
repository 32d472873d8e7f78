"""The first run on a machine compiles kernels and says so; the next one finds their code, if unchanged."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

import vexport
from tests.models import save_llama
from vexport.numerics.jit import FOLDERS, PACKAGE

LINE = "compile kernels, once"


def copied(folder: Path) -> Path:
    """The package at another place, without what is compiled."""
    package = Path(vexport.__file__).parent
    return copytree(package, folder / "vexport", ignore=ignore_patterns("__pycache__"))


@pytest.mark.slow
def test_compiling_is_announced_once(tmp_path: Path) -> None:
    """Also where the package is installed a second time, with other times of its files."""
    source = save_llama(tmp_path / "model")
    again = copied(tmp_path / "copy")
    for file in again.rglob("*.py"):
        os.utime(file, (0, 0))
    said = []
    for out, package in (("first", Path(vexport.__file__).parent), ("second", again)):
        ran = subprocess.run(
            [sys.executable, "-m", "vexport", "quantize", source, tmp_path / out, "--scheme", "FP8_DYNAMIC"],
            check=True,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(package.parent), "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        )
        said.append([line for line in ran.stderr.splitlines() if line.startswith(LINE)])
    assert said[0][0] == f"{LINE} ..."
    assert said[0][1].startswith(f"{LINE}: done in ")
    assert said[1] == []


@pytest.mark.slow
def test_a_change_of_one_kernel_file_reaches_the_kernels_of_others(tmp_path: Path) -> None:
    package = copied(tmp_path)
    code = (
        "import numpy as np; from vexport.numerics.codes import e4m3_codes; codes = np.zeros(1, np.uint8); "
        "e4m3_codes(np.float32([1e6]), np.float32([1]), codes); print(codes[0])"
    )

    def largest_code() -> int:
        ran = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        )
        return int(ran.stdout)

    assert largest_code() == 0x7E
    constants = package / "numerics" / "constants.py"
    constants.write_text(constants.read_text().replace("E4M3_MAX = 448.0", "E4M3_MAX = 240.0"))
    assert largest_code() == 0x77


def test_the_digest_covers_every_module_that_compiles() -> None:
    compiling = [path for path in PACKAGE.rglob("*.py") if "@compiled(" in path.read_text()]
    assert len(compiling) > 5
    assert [path for path in compiling if path.parent not in FOLDERS] == []
