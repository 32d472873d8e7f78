"""`scheme: auto` with smoothed candidates. Sensitivity measures them as they are written."""

from pathlib import Path

import pytest

from tests.calibration.test_smoothing import with_large_channels
from tests.models import save_llama, write_calibration
from tests.run.test_stages import options_of
from vexport.checkpoint.smoothed import SMOOTHING, smoothing_of
from vexport.outputs import RECIPE
from vexport.run.directory import RunDirectory
from vexport.run.stages.making import (
    MAKING,
    Maker,
    calibrate,
    check,
    choose_auto_schemes,
    measure_sensitivity,
    plan_candidates,
)
from vexport.scenario import read_scenario


def run_until_written(folder: Path, smoothing: str) -> Maker:
    """Return a run of a scenario with the given smoothing, up to its checkpoint."""
    path = folder / f"{smoothing}.yaml"
    path.write_text(
        f"""
name: smoothed
source: {folder / "llama"}
rules: [{{match: Linear, scheme: auto}}]
auto: {{candidates: [W4A16, W8A8, keep], share: 0.58}}
smoothing: {smoothing}
calibration: {{data: {folder / "text.jsonl"}, samples: 8, seq_len: 64}}
sensitivity: {{samples: 4}}
evaluate: {{tasks: [unused]}}
""",
        encoding="utf-8",
    )
    return run_of(path, folder / f"run-{smoothing}")


def run_of(scenario_file: Path, run_dir: Path) -> Maker:
    """Run a scenario up to its checkpoint."""
    scenario = read_scenario(scenario_file)
    maker = Maker(scenario, RunDirectory(run_dir), options_of(scenario.serve))
    run_dir.mkdir()
    maker.do(plan_candidates, *MAKING[: MAKING.index(check)])
    return maker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    with_large_channels(save_llama(folder / "llama"))
    write_calibration(folder / "text.jsonl", rows=8)
    return folder


@pytest.fixture(scope="module")
def smoothed(folder: Path) -> Maker:
    return run_until_written(folder, "0.5")


def loss_of_smoothed(run: Maker) -> float:
    """Return the loss in W8A8 of the groups whose input is the output of a norm."""
    return sum(
        choice.loss
        for group in run.result(measure_sensitivity).groups
        for choice in group.schemes
        if choice.scheme == "W8A8" and group.name.endswith(("qkv_proj", "gate_up_proj"))
    )


@pytest.mark.slow
def test_sensitivity_measures_smoothed_weights(folder: Path, smoothed: Maker) -> None:
    plain = run_until_written(folder, "0")
    assert not plain.result(calibrate).smoothing
    assert not (plain.checkpoint / SMOOTHING).exists()
    assert loss_of_smoothed(smoothed) < 0.7 * loss_of_smoothed(plain)


def test_recipe_reproduces_smoothed_checkpoint(folder: Path, smoothed: Maker) -> None:
    chosen = {choice.name: choice.scheme for choice in smoothed.result(choose_auto_schemes).choices}
    assert {"W4A16", "W8A8"} <= set(chosen.values())
    kept, found = smoothing_of(smoothed.checkpoint), smoothed.result(calibrate).smoothing
    assert kept
    assert len(kept) < len(found)
    again = run_of(smoothed.checkpoint / RECIPE, folder / "again")
    assert smoothing_of(again.checkpoint) == kept
    for file in sorted(smoothed.checkpoint.glob("*.safetensors")):
        assert (again.checkpoint / file.name).read_bytes() == file.read_bytes()
