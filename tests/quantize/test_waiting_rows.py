"""Rows of text run once through a layer where they can wait in it, twice where they are too many."""

from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.calibration.make import samples
from tests.calibration.models import configs, save
from vexport.plan import Settings
from vexport.plan.source import plan_headers
from vexport.quantize import two_streams
from vexport.quantize.rounding import round_weights
from vexport.rounding import settings
from vexport.rounding.settings import COMPARED_ROWS, most_waiting
from vexport.scenario import Rule
from vexport.types import Calibration, silent
from vexport.types.rounding import RoundingReport

ROWS, LAYERS = 12, 3
TEXT = samples((32,) * ROWS)


def gptq(folder: Path, out: Path) -> RoundingReport:
    rules = [Rule(match="Linear", scheme="W4A16_CHANNEL", rounding="gptq", observer="memoryless_minmax")]
    index, plan = plan_headers(str(folder), rules, Settings(), silent)
    calibration = Calibration(rows=TEXT.rows, digest=TEXT.digest, tokens=ROWS * 32, ranges={})
    _, report = round_weights(
        index,
        plan,
        calibration,
        TEXT,
        out,
        on_progress=silent,
        trust_remote_code=False,
        device="cpu",
        held_out=0,
    )
    return report


@pytest.mark.parametrize(
    ("limit", "most"), [("max\n", 2**20), ("1048576\n", 2**19), ("99999999999999\n", 2**20)]
)
def test_no_more_wait_than_half_of_what_the_control_group_has(
    limit: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(settings, "MOST_WAITING", 2**20)
    monkeypatch.setattr(settings, "CGROUP_MEMORY", tmp_path / "memory.max")
    assert most_waiting() == most


@pytest.mark.parametrize(("most", "passes"), [(2**30, 1), (0, 2)])
def test_each_row_runs_as_often_as_it_must(
    most: int, passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compared runs through the source's layers, too; the first row shows what a layer returns."""
    monkeypatch.setattr(two_streams, "most_waiting", lambda: most)
    folder = save(configs()["llama"], tmp_path / "llama")
    begun, forward = list[int](), LlamaMLP.forward

    def counted(self: LlamaMLP, value: torch.Tensor) -> torch.Tensor:
        begun.append(1)
        answer: torch.Tensor = forward(self, value)
        return answer

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    report = gptq(folder, tmp_path / "rounded")
    assert len(begun) == 1 + LAYERS * (COMPARED_ROWS + passes * ROWS)
    assert len(report.layers) == LAYERS
    assert len(report.groups) == 4 * LAYERS
    assert all(group.rounding == "gptq" for group in report.groups)
    assert all(group.tokens == ROWS * 32 for group in report.groups)
    assert all(group.error < group.nearest_error for group in report.groups)
    assert all(layer.state_error > 0 for layer in report.layers)
