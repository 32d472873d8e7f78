"""A call that is interrupted while it measures gradients."""

import json
from pathlib import Path

import pytest

from tests.command import ROOT
from vexport.api import Calibration, quantize
from vexport.calibration.gradients import NOT_KEPT
from vexport.cli import INTERRUPTED, entry
from vexport.files import digest_file
from vexport.records import OnProgress, silent
from vexport.records.calibration import GRADIENTS

MODEL = ROOT / "scenarios" / "demo" / "model"
TEXT = ROOT / "scenarios" / "demo" / "calibration.jsonl"


def make(out: Path, on_progress: OnProgress = silent) -> None:
    """Quantize the demo model with a refit."""
    text = Calibration(data=str(TEXT), samples=4, seq_len=16, device="cpu")
    quantize(
        MODEL,
        out,
        scheme="W4A16",
        group_size=64,
        calibration=text,
        verify=False,
        on_progress=on_progress,
    )


@pytest.mark.slow
def test_gradients_start_again_with_same_bytes(tmp_path: Path) -> None:
    """The interrupt comes on the way back, between two layers."""

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == GRADIENTS and done == 5:
            raise KeyboardInterrupt

    whole, out = tmp_path / "whole", tmp_path / "out"
    make(whole)
    with pytest.raises(KeyboardInterrupt) as caught:
        make(out, interrupt)
    assert caught.value.__notes__ == [NOT_KEPT]
    assert not out.exists()
    resumed = list[str]()
    make(out, lambda stage, done, total: resumed.append(stage))
    assert any("resumes" in stage for stage in resumed)
    names = [file.name for file in whole.glob("*.safetensors")]
    assert [digest_file(whole / name) for name in names] == [
        digest_file(out / name) for name in names
    ]
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (whole, out))
    assert first == second


def test_interrupted_line_has_the_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(**arguments: object) -> None:
        problem = KeyboardInterrupt(130)
        problem.add_note(NOT_KEPT)
        raise problem

    monkeypatch.setattr(entry.cli, "main", interrupt)
    assert entry.run_command() == 130
    assert f"{INTERRUPTED}; {NOT_KEPT}" in capsys.readouterr().err
