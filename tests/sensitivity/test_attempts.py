"""Rounds of a run: what failed is set aside whole, what the next round starts from as well stays."""

from pathlib import Path

import pytest

from tests.command import vexport
from vexport.run.attempts import read_attempts, set_aside
from vexport.run.directory import RunDirectory
from vexport.types import Attempt, Promotion

OWN = ("checkpoint/config.json", "plan.json", "check.json", "report.json", "eval/candidate/session.json")
SHARED = ("calibration/statistics.json", "sensitivity.json", "eval/baseline/session.json")
PROMOTION = Promotion(name="a", before="NVFP4", after="FP8_DYNAMIC", num_bytes=40, loss=0.5)
SCENARIO = "name: a\nsource: b\nrules: [{match: Linear, scheme: W4A16}]\n"


def attempt(number: int, promotions: tuple[Promotion, ...]) -> Attempt:
    return Attempt(
        number=number,
        folder=f"attempts/{number}",
        promotions=promotions,
        output_bytes=100,
        loss=1.0,
        outcome="FAIL",
        reason="a loss",
    )


def fill(folder: Path, text: str) -> RunDirectory:
    directory = RunDirectory(folder)
    directory.begin(overwrite=False)
    for name in (*OWN, *SHARED):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for stage in ("calibrate", "quantize", "serve baseline", "serve candidate"):
        directory.finish(stage, {"from": text}, 1.0)
    return directory


def test_what_failed_is_moved_and_the_rest_stays(tmp_path: Path) -> None:
    directory = fill(tmp_path, "first")
    set_aside(directory, attempt(1, ()), read_attempts(tmp_path), (PROMOTION,))
    for name in OWN:
        assert not (tmp_path / name).exists()
        assert (tmp_path / "attempts/1" / name).read_text() == "first"
    assert all((tmp_path / name).read_text() == "first" for name in SHARED)
    again = RunDirectory(tmp_path)
    assert again.is_done("calibrate", {"from": "first"})
    assert again.is_done("serve baseline", {"from": "first"})
    assert not again.is_done("quantize", {"from": "second"})
    assert not again.is_done("serve candidate", {"from": "second"})
    attempts = read_attempts(tmp_path)
    assert [one.folder for one in attempts.failed] == ["attempts/1"]
    assert attempts.promotions == (PROMOTION,)
    assert attempts.seconds == 2  # of quantize and serve candidate


def test_a_call_broken_off_between_sets_the_round_aside_anew(tmp_path: Path) -> None:
    """All was moved, but the rounds were not written: the round is repeated and replaces what lies there."""
    set_aside(fill(tmp_path, "first"), attempt(1, ()), read_attempts(tmp_path), (PROMOTION,))
    (tmp_path / "attempts.json").unlink()
    set_aside(fill(tmp_path, "again"), attempt(1, ()), read_attempts(tmp_path), (PROMOTION,))
    assert all((tmp_path / "attempts/1" / name).read_text() == "again" for name in OWN)
    set_aside(
        fill(tmp_path, "second"), attempt(2, (PROMOTION,)), read_attempts(tmp_path), (PROMOTION, PROMOTION)
    )
    assert (tmp_path / "attempts/1/plan.json").read_text() == "again"
    assert (tmp_path / "attempts/2/plan.json").read_text() == "second"
    assert len(read_attempts(tmp_path).promotions) == 3
    assert read_attempts(tmp_path).seconds == 4


@pytest.mark.parametrize("missing", ["evaluate", "calibration"])
def test_until_pass_needs_tasks_and_samples(missing: str, tmp_path: Path) -> None:
    sections = {"evaluate": "evaluate: {tasks: [t.yaml]}\n", "calibration": "calibration: {data: c.jsonl}\n"}
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO + "".join(text for key, text in sections.items() if key != missing))
    ran = vexport("run", path, "--run-dir", tmp_path / "run", "--until-pass")
    assert ran.code == 2
    assert f"a: {missing}: got nothing" in ran.errors[0]
    assert not (tmp_path / "run").exists()
