"""Another package's observer and calibration data, from the example of the docs, by entry points alone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import save_llama, write_calibration
from tests.plugins.package import write_package
from vexport.errors import EnvironmentFault
from vexport.observers import MemorylessMinMaxObserver, Observer
from vexport.plugins import plugins

DEMO = Path(__file__).parents[2] / "scenarios" / "demo" / "model"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package, installed for this test."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(write_package(folder)))
    plugins.cache_clear()
    yield folder
    plugins.cache_clear()


def run(package: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """vexport in a process that finds the package."""
    return subprocess.run(
        [sys.executable, "-m", "vexport", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}"},
    )


def test_they_are_listed_with_their_package(package: Path) -> None:
    listed = vexport("list", "observers").stdout
    assert "half_range" in listed
    assert "of the package my-package" in listed
    listed = vexport("list", "calibration").stdout
    assert "default" in listed
    assert "support_chats" in listed
    listed = vexport("list", "roundings").stdout
    assert all(name in listed for name in ("nearest", "gptq", "refit", "damped_gptq"))
    unknown = vexport("plan", DEMO, "--scheme", "W8A8", "--rounding", "damped")
    assert unknown.code == 2
    assert "damped_gptq" in unknown.stderr
    assert vexport("plan", DEMO, "--scheme", "W8A8", "--observer", "half_range").code == 0
    assert (
        "did you mean half_range?"
        in vexport("plan", DEMO, "--scheme", "W8A8", "--observer", "halfrange").stderr
    )


def test_quantize_uses_both(package: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(DEMO)
    (package / "my_package.py").write_text(
        (package / "my_package.py").read_text().replace('{"messages"', '{"text": "one plus two", "other"')
    )
    out, usual = tmp_path / "out", tmp_path / "usual"
    ran = run(package, "quantize", DEMO, out, "--scheme", "FP8", "--rounding", "nearest",
              "--observer", "half_range", "--calibration", "support_chats")  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "1 sample of support_chats" in ran.stdout
    assert vexport("quantize", DEMO, usual, "--scheme", "FP8", "--rounding", "nearest").code == 0
    one, two = ((folder / "model.safetensors").read_bytes() for folder in (out, usual))
    assert one != two
    assert '"observer": "half_range"' in (out / "config.json").read_text()
    assert vexport("check", out).code == 0


def test_its_rounding_rounds(package: Path, tmp_path: Path) -> None:
    source, out = save_llama(tmp_path / "llama", num_hidden_layers=1), tmp_path / "out"
    text = write_calibration(tmp_path / "text.jsonl", rows=2)
    ran = run(package, "quantize", source, out, "--scheme", "W4A16", "--calibration", text,
              "--rounding", "damped_gptq", "--format", "json")  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (layer,) = json.loads(ran.stdout)["rounding"]["layers"]
    assert {(group["rounding"], round(group["damping"], 6)) for group in layer["groups"]} == {
        ("damped_gptq", 0.3)
    }
    planned = run(package, "plan", source, "--scheme", "W4A16", "--rounding", "damped_gptq")
    assert planned.returncode == 0, planned.stderr


def test_what_is_no_rounding_is_named(package: Path, tmp_path: Path) -> None:
    file = package / "my_package.py"
    file.write_text(file.read_text().replace("class DampedGptq(Gptq)", "class DampedGptq"))
    source = save_llama(tmp_path / "llama", num_hidden_layers=1)
    text = write_calibration(tmp_path / "text.jsonl", rows=2)
    ran = run(package, "quantize", source, tmp_path / "out", "--scheme", "W4A16", "--calibration", text,
              "--rounding", "damped_gptq")  # fmt: skip
    assert ran.returncode == EnvironmentFault.exit_code
    assert "vexport.roundings damped_gptq: got" in ran.stderr


def test_a_package_that_cannot_be_imported_is_named(package: Path, tmp_path: Path) -> None:
    (package / "my_package.py").write_text("import nothing_of_that_name\n")
    sys.modules.pop("my_package", None)
    ran = vexport("quantize", DEMO, tmp_path / "out", "--scheme", "FP8", "--calibration", "support_chats")
    assert ran.code == EnvironmentFault.exit_code
    assert "nothing_of_that_name" in ran.errors[0]
    assert "my-package" in ran.errors[0]


def test_a_class_is_registered_under_a_name_once() -> None:
    @Observer.register("test_twice_the_range")
    class Twice(MemorylessMinMaxObserver):
        """Twice the range."""

    assert Observer.register("test_twice_the_range")(Twice) is Twice
    ran = vexport("plan", DEMO, "--scheme", "W8A8", "--observer", "test_twice_the_range")
    assert ran.code == 0, ran.stderr
    with pytest.raises(ValueError, match="a second class of that name"):
        Observer.register("minmax")(Twice)
