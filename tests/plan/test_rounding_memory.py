"""What rounding takes by the plan: one matrix for each input of a layer, two where it refits."""

from pathlib import Path

import pytest

from tests.calibration.models import expert_configs, save
from tests.models import save_llama
from vexport.checkpoint.index import SourceIndex, read_index
from vexport.plan import build_plan, rounding_memory
from vexport.plan.estimates import Samples, estimates
from vexport.plan.rounding_memory import rounding_bytes
from vexport.rounding import settings
from vexport.rounding.settings import most_waiting
from vexport.scenario import Rule
from vexport.types import Plan
from vexport.types.rounding import Rounding


@pytest.fixture
def no_row_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding_memory, "most_waiting", lambda: 0)


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


def plan_of(folder: Path, rounding: Rounding) -> tuple[SourceIndex, Plan]:
    index = read_index(folder)
    return index, build_plan(index, [Rule(match="Linear", scheme="MXFP4A16", rounding=rounding)])


def added_by_refit(folder: Path) -> int:
    """With too few rows to hold one out a refit is one recipe, as GPTQ is."""
    refit, gptq = (
        rounding_bytes(*plan_of(folder, rounding), rows=7, tokens=32) for rounding in ("refit", "gptq")
    )
    return refit - gptq


def test_a_refit_has_second_moments_of_both_streams(tmp_path: Path, no_row_waits: None) -> None:
    """q/k/v, o, and gate/up have 256 inputs, down has 512, in float32."""
    assert added_by_refit(save_llama(tmp_path / "llama")) == (3 * 256**2 + 512**2) * 4


def test_experts_share_those_of_gate_and_up(tmp_path: Path, no_row_waits: None) -> None:
    """Of 64 inputs: q/k/v, o, and all gates and ups together; of 128: each of 8 down projections."""
    folder = save(expert_configs()["mixtral"], tmp_path / "mixtral")
    assert added_by_refit(folder) == (3 * 64**2 + 8 * 128**2) * 4


def test_rows_wait_for_the_widest_input(tmp_path: Path) -> None:
    """Next to its moments 7 * 32 tokens of the source's inputs in 16 bits; of experts all have one place."""
    kept = 7 * 32 * 2
    assert added_by_refit(save_llama(tmp_path / "llama")) == 512**2 * 4 + 512 * kept
    folder = save(expert_configs()["mixtral"], tmp_path / "mixtral")
    assert added_by_refit(folder) == (64**2 + 8 * 128**2) * 4 + 64 * kept


def test_the_estimate_has_it(tmp_path: Path) -> None:
    """All rows run in two streams, of the source and of the strength that was chosen on a few of them, and
    wait with what enters 3 inputs of 256 columns and one of 512, four times that of the last."""
    folder = save_llama(tmp_path / "llama")
    memory = [
        estimate.memory_bytes
        for rows in (32, 64)
        for estimate in estimates(*plan_of(folder, "refit"), Samples(number=rows, tokens=4096))
        if estimate.stage == "quantize"
    ]
    states = 4096 * 256 * 2
    waiting = 4096 * (3 * 256 + 512 + 3 * 512) * 2
    assert memory[1] - memory[0] == 32 * (2 * states + waiting)
    index, plan = plan_of(folder, "nearest")
    assert [one.stage for one in estimates(index, plan, Samples(number=64, tokens=512))] == [
        "quantize",
        "check",
    ]
