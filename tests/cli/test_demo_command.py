"""`vexport demo` writes a scenario that can be planned and quantized where it stands."""

from pathlib import Path

import pytest

from tests.command import vexport
from vexport.scenario import read_scenario
from vexport.scenario.shipped import PACKAGE, demo_files

SOURCE = PACKAGE.parent / "scenarios"


def test_the_demo_is_written_and_can_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = vexport("demo")
    assert ran.code == 0
    assert "next: vexport run vexport-demo/demo-nvfp4.yaml" in ran.stdout
    plan = vexport("plan", "vexport-demo/demo-nvfp4.yaml")
    assert plan.code == 0
    assert "NVFP4" in plan.stdout
    for path in demo_files(SOURCE):
        assert (Path("vexport-demo") / path).read_bytes() == (SOURCE / path).read_bytes()


def test_every_scenario_of_the_demo_has_its_files(tmp_path: Path) -> None:
    """What the scenarios name lies below the folder: nothing is read from where they came from."""
    assert vexport("demo", tmp_path / "demo").code == 0
    written = sorted((tmp_path / "demo").glob("*.yaml"))
    assert [path.name for path in written] == sorted(path.name for path in SOURCE.glob("demo-*.yaml"))
    for path in written:
        scenario = read_scenario(path)
        assert scenario.evaluate is not None
        named = [scenario.source, *scenario.evaluate.tasks, scenario.evaluate.baseline or scenario.source]
        named += [str(scenario.calibration.data)] if scenario.calibration else []
        for name in named:
            assert Path(name).is_relative_to(tmp_path / "demo")
            assert Path(name).exists()


def test_what_exists_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    for options in ((), ("--overwrite",)):
        ran = vexport("demo", target, *options)
        assert ran.code == 2
        assert [path.name for path in target.iterdir()] == ["mine.txt"]
    assert vexport("demo", tmp_path / "other").code == 0
    (tmp_path / "other" / "demo" / "mine.txt").write_text("mine")
    ran = vexport("demo", tmp_path / "other", "--overwrite")
    assert (ran.code, "mine.txt" in ran.stderr) == (2, True)
    (tmp_path / "other" / "demo" / "mine.txt").unlink()
    (tmp_path / "other" / "demo-nvfp4.yaml").write_text("changed")
    assert vexport("demo", tmp_path / "other").code == 2
    assert vexport("demo", tmp_path / "other", "--overwrite").code == 0
    assert (tmp_path / "other" / "demo-nvfp4.yaml").read_bytes() == (SOURCE / "demo-nvfp4.yaml").read_bytes()
