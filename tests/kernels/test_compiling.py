"""The first run on a machine compiles kernels and says so; the next one finds their code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import save_llama

LINE = "compile kernels, once"


@pytest.mark.slow
def test_compiling_is_announced_once(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "model")
    said = []
    for out in ("first", "second"):
        ran = subprocess.run(
            [sys.executable, "-m", "vexport", "quantize", source, tmp_path / out, "--scheme", "FP8_DYNAMIC"],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        )
        said.append([line for line in ran.stderr.splitlines() if line.startswith(LINE)])
    assert said[0][0] == f"{LINE} ..."
    assert said[0][1].startswith(f"{LINE}: done in ")
    assert said[1] == []
