"""Workers import from PYTHONPATH and from installed packages, but not from the current folder."""

import sys
from pathlib import Path

import pytest

from vexport.engine.session import Worker
from vexport.records import silent

ROOT = Path(__file__).parents[2]


@pytest.mark.vllm
@pytest.mark.parametrize("python", [None, Path(sys.executable)], ids=["own", "vllm-python"])
@pytest.mark.parametrize("path", ["{root}:{named}", "{root}:{named}:", ":{root}::{named}"])
def test_current_folder_is_not_imported(
    path: str, python: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty entry of PYTHONPATH would be the current folder."""
    current, named = tmp_path / "current", tmp_path / "named"
    for folder, names in ((current, ("stray", "good")), (named, ("good",))):
        folder.mkdir()
        for name in names:
            (folder / f"{name}.py").write_text("")
    monkeypatch.chdir(current)
    monkeypatch.setenv("PYTHONPATH", path.format(root=ROOT, named=named))
    result = Worker(
        module="tests.engine.importing",
        request={"names": ["stray", "good", "vexport", "vllm"]},
        kind=dict[str, dict[str, str]],
        where="here",
        log=tmp_path / "log",
        timeout=60,
        vllm_python=python,
    ).run(silent)
    for found in result.values():
        assert found["stray"] == ""
        assert found["good"] == str(named / "good.py")
        assert found["vexport"]
        assert found["vllm"]
