"""The commands as functions: they do what the command line does, and return what it prints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import vexport
from vexport.api import Calibration, Evaluate, Rule, check, evaluate, quantize, verdict
from vexport.errors import InputError

DEMO = Path(__file__).parents[2] / "scenarios" / "demo" / "model"


def test_quantize_and_check_as_the_command_line(llama: Path, calibration: Path, tmp_path: Path) -> None:
    data = Calibration(data=str(calibration), samples=4)
    answer = quantize(llama, tmp_path / "a", scheme="NVFP4", calibration=data, ignore=["down_proj"])
    assert (answer.schemes, answer.calibration_rows) == (("NVFP4",), 4)
    options = ("--calibration", calibration, "--samples", "4", "--ignore", "down_proj", "--format", "json")
    ran = vexport("quantize", llama, tmp_path / "b", "--scheme", "NVFP4", *options)
    assert json.loads(ran.stdout)["calibration_digest"] == answer.calibration_digest
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert one == two
    assert check(tmp_path / "a", tp=(1, 2), sm=(90,)).ok
    (tmp_path / "a" / "model.safetensors").unlink()
    assert not check(tmp_path / "a").ok
    with pytest.raises(InputError):
        check(tmp_path / "none")


def test_rules_in_the_place_of_a_scheme(llama: Path, tmp_path: Path) -> None:
    rules = [Rule(match="down_proj", scheme="W8A8"), Rule(match="Linear", scheme="FP8_DYNAMIC")]
    assert set(quantize(llama, tmp_path / "a", rules=rules).schemes) == {"W8A8", "FP8_DYNAMIC"}
    with pytest.raises(ValueError, match="scheme and rules"):
        quantize(llama, tmp_path / "b")
    with pytest.raises(InputError, match="no calibration data"):
        quantize(llama, tmp_path / "b", scheme="FP8")
    with pytest.raises(ValueError, match="no baseline"):
        evaluate(llama, Evaluate(tasks=("a",)), tmp_path / "results")


def test_verdict_of_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        verdict(tmp_path / "a", tmp_path / "b")
    with pytest.raises(InputError, match="margin"):
        verdict(tmp_path, tmp_path, margin=2)


def test_the_api_does_not_end_its_caller_s_process_and_loads_no_vllm(llama: Path) -> None:
    """As the command line does where a disk does not answer; and no engine is there to be started."""
    code = (
        "import sys, threading, vexport.api as api; api.check(sys.argv[1]); print(threading.enumerate()); "
        "print([name for name in ('vllm', 'lm_eval') if name in sys.modules])"
    )
    arguments = [sys.executable, "-c", code, str(llama)]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=True)
    threads, loaded = ran.stdout.splitlines()
    assert "MainThread" in threads
    assert "reads" not in threads
    assert loaded == "[]"
