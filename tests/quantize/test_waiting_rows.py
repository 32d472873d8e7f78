"""Rows of text run once through a layer, and wait in it until what they reach is rounded."""

from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.calibration.make import samples
from tests.calibration.models import configs, save
from vexport.calibration import Samples
from vexport.calibration.walk import LayerWalk
from vexport.checkpoint.index import read_index
from vexport.errors import InputError
from vexport.plan.build import PlanSettings
from vexport.plan.source import plan_headers
from vexport.quantize.rounding import COMPARED_ROWS, round_weights
from vexport.records import CalibrationRecord, silent
from vexport.records.rounding import RoundingReport
from vexport.rounding import settings
from vexport.rounding.settings import most_waiting, require_room, waiting_bytes
from vexport.scenario import Rule

ROWS, LAYERS = 12, 3
TEXT = samples((32,) * ROWS)


def gptq(folder: Path, out: Path) -> RoundingReport:
    rules = [Rule(match="Linear", scheme="W4A16_CHANNEL", rounding="gptq", observer="memoryless_minmax")]
    index, plan = plan_headers(str(folder), rules, PlanSettings(), silent)
    calibration = CalibrationRecord(rows=TEXT.rows, digest=TEXT.digest, tokens=ROWS * 32, ranges={})
    return round_weights(LayerWalk(index), plan, calibration, TEXT, out)[1]


@pytest.mark.parametrize("limit", ["max\n", "1048576\n", "99999999999999\n"])
def test_no_more_wait_than_half_of_what_the_control_group_has(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = most_waiting()
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(settings, "CGROUP_MEMORY", tmp_path / "memory.max")
    assert most_waiting() == (2**19 if "1048576" in limit else whole)


def test_text_that_does_not_fit_is_refused_with_how_many_samples_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else depends on the memory that there is."""
    folder = save(configs()["llama"], tmp_path / "llama")
    rules = [Rule(match="Linear", scheme="W4A16_CHANNEL", rounding="gptq")]
    _, plan = plan_headers(str(folder), rules, PlanSettings(), silent)
    needed = waiting_bytes(plan.groups, ROWS * 32)
    monkeypatch.setattr(settings, "most_waiting", lambda device: needed // 2)
    with pytest.raises(InputError, match=f"--samples {ROWS // 2}"):
        require_room(plan.groups, ROWS * 32, ROWS, "cpu")
    require_room(plan.groups, ROWS * 16, ROWS // 2, "cpu")


def test_a_rank_without_rows_walks_along(tmp_path: Path) -> None:
    """With more ranks than rows of text."""
    index = read_index(save(configs()["llama"], tmp_path / "llama"))
    walk = LayerWalk(index)
    with walk.text(Samples(token_ids=(), rows=())):
        assert [len(layer.calls) for layer in walk.forward()] == [0] * LAYERS


def test_each_row_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared runs through the source's layers, too; the first row shows what a layer returns."""
    folder = save(configs()["llama"], tmp_path / "llama")
    begun, forward = list[int](), LlamaMLP.forward

    def counted(self: LlamaMLP, value: torch.Tensor) -> torch.Tensor:
        begun.append(1)
        answer: torch.Tensor = forward(self, value)
        return answer

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    report = gptq(folder, tmp_path / "rounded")
    assert len(begun) == 1 + LAYERS * (COMPARED_ROWS + ROWS)
    assert len(report.layers) == LAYERS
    assert len(report.groups) == 4 * LAYERS
    assert all(group.rounding == "gptq" for group in report.groups)
    assert all(group.tokens == ROWS * 32 for group in report.groups)
    assert all(group.error < group.nearest_error for group in report.groups)
    assert all(layer.state_error > 0 for layer in report.layers)
