"""Of much text a part is enough to choose the strength of a refit; all of it rounds the weights."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.calibration.make import samples
from tests.calibration.models import configs, save
from vexport.checkpoint.index import SourceIndex
from vexport.plan import Settings
from vexport.plan.source import plan_headers
from vexport.quantize.rounding import TOKEN_WEIGHTS, TRIAL_LAYERS, round_weights, trial_text
from vexport.rounding import settings
from vexport.rounding.settings import CANDIDATES, trial_rows
from vexport.scenario import Rule
from vexport.types import Calibration, OnProgress, Plan, silent
from vexport.types.rounding import RoundingReport

ROWS, LENGTH = 40, 32
TEXT = samples((LENGTH,) * ROWS)


class Broken(Exception):
    """What ends a call in the middle."""


def plan_of(folder: Path) -> tuple[SourceIndex, Plan]:
    rules = [Rule(match="Linear", scheme="W4A16_CHANNEL", rounding="refit", observer="memoryless_minmax")]
    return plan_headers(str(folder), rules, Settings(), silent)


def run(folder: Path, out: Path, on_progress: OnProgress) -> tuple[Mapping[str, bytes], RoundingReport]:
    index, plan = plan_of(folder)
    found, report = round_weights(
        index,
        plan,
        Calibration(rows=TEXT.rows, digest=TEXT.digest, tokens=ROWS * LENGTH, ranges={}),
        TEXT,
        out,
        on_progress=on_progress,
        trust_remote_code=False,
        device="cpu",
    )
    return {name: found[name].tobytes() for name in found}, report


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough are as many as the columns of a micro model ask for."""
    monkeypatch.setattr(settings, "TRIAL_TOKENS", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(configs()["llama"], tmp_path_factory.mktemp("trial") / "llama")


def test_rows_are_spread_and_the_last_are_held_out(folder: Path) -> None:
    _, plan = plan_of(folder)
    columns = max(group.members[0].in_features for group in plan.groups)
    tried, held_out = trial_rows(ROWS, ROWS * LENGTH, columns, None)
    assert 0 < held_out < tried < ROWS
    text, held = trial_text(TEXT, plan.groups, None)
    assert (len(text.rows), held) == (tried, held_out)
    assert len(set(text.rows)) == tried
    assert max(text.rows) - min(text.rows) > ROWS
    fitted, out = text.rows[:-held], text.rows[-held:]
    assert list(fitted) == sorted(fitted)
    assert list(out) == sorted(out)
    assert text == TEXT.taken([TEXT.rows.index(row) for row in text.rows])


def test_little_text_is_tried_whole(folder: Path) -> None:
    _, plan = plan_of(folder)
    little = TEXT.taken(range(8))
    text, held = trial_text(little, plan.groups, None)
    assert (sorted(text.rows), held) == (list(little.rows), 1)
    assert trial_text(TEXT.taken(range(7)), plan.groups, None)[1] == 0


def test_all_text_rounds_and_a_broken_call_goes_on_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    expected, report = run(folder, tmp_path / "whole", silent)
    assert len(report.tried) > len(CANDIDATES) - 1
    assert report.chosen.divergence == min(one.divergence or 0.0 for one in report.tried)
    assert {group.tokens for group in report.groups} == {ROWS * LENGTH}
    out, stages = tmp_path / "out", list[str]()

    def end_after_a_layer(stage: str, done: int, total: int) -> None:
        if stage not in stages:
            stages.append(stage)
            raise Broken

    for number in range(3):
        with pytest.raises(Broken):
            run(folder, out, end_after_a_layer)
        assert len(stages) == number + 1
        assert (out / TOKEN_WEIGHTS).is_file() == bool(number)
    found, again = run(folder, out, end_after_a_layer)
    assert found == expected
    assert again == report
    assert not list(out.glob(f"{TRIAL_LAYERS}*"))
