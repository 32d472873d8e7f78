"""The time of calibration that is estimated before it begins."""

import json
from pathlib import Path

import pytest

from tests.calibration.seeing import save_seeing
from tests.command import vexport
from tests.texts import assert_contains
from vexport.api import plan
from vexport.checkpoint.index import read_index
from vexport.plan.duration import (
    LONG_SECONDS,
    about_minutes,
    calibration_seconds,
    duration_line,
    speed,
    tower_operations,
)
from vexport.rules.quantize import NEAREST_TOWER


def test_seconds_follow_tokens_and_weights(llama: Path) -> None:
    """Rounding with text has a part that does not depend on the number of tokens."""
    static, refit = (plan(llama, scheme=scheme, has_text=True) for scheme in ("FP8", "W4A16"))
    few, many = (calibration_seconds(static, samples=rows, seq_len=64) for rows in (8, 800))
    assert many == 100 * few
    rounded, more = (calibration_seconds(refit, samples=rows, seq_len=64) for rows in (8, 800))
    assert few < rounded < more < 100 * rounded


def test_smoothing_reads_a_few_rows(llama: Path) -> None:
    """W8A8 needs no statistics, so only the rows for gradients run."""
    smoothed = plan(llama, scheme="W8A8", has_text=True)
    few, many = (calibration_seconds(smoothed, samples=rows, seq_len=64) for rows in (16, 800))
    assert few == many > 0


def test_only_long_calibrations_have_a_line(llama: Path) -> None:
    static = plan(llama, scheme="FP8", has_text=True)
    second = 1 / calibration_seconds(static, samples=1, seq_len=1)
    assert duration_line(static, samples=int(second * (LONG_SECONDS - 1)), seq_len=1) is None
    line = duration_line(static, samples=int(second * 2400), seq_len=1)
    assert line is not None
    assert_contains(line, "about 40 minutes", "up to four times as long")


def test_pictures_take_time(tmp_path: Path) -> None:
    """The tower of LLaVA has 128 x 588 weights of patches, and a patch has 14 x 14 pixels."""
    index = read_index(save_seeing("llava", tmp_path / "model"))
    tower = [
        tensor
        for name, tensor in index.tensors.items()
        if len(tensor.shape) == 2
        and not name.startswith(("language_model.", "model.language_model."))
    ]
    weights = sum(tensor.shape[0] * tensor.shape[1] for tensor in tower)
    assert weights > 0
    patches = 16
    assert tower_operations(index, patches * 3 * 14 * 14) == 2 * weights * patches
    seeing = plan(index.root, scheme="FP8", has_text=True)
    text, both = (
        calibration_seconds(seeing, samples=8, seq_len=64, pictures=operations)
        for operations in (0.0, 1e12)
    )
    assert both - text == pytest.approx(1e12 / speed())


def test_tower_is_noted_once(tmp_path: Path) -> None:
    """The note is in the plan, and only if text rounds other layers."""
    source = save_seeing("qwen2.5-vl", tmp_path / "model")
    rounded, nearest = (
        plan(source, scheme=scheme, has_text=True, include_vision=True)
        for scheme in ("W4A16", "FP8_DYNAMIC")
    )
    assert [note.rule for note in rounded.notes].count(NEAREST_TOWER.id) == 1
    assert NEAREST_TOWER.id not in [note.rule for note in nearest.notes]


def test_minutes_in_words() -> None:
    assert about_minutes(20) == "about 1 minute"
    assert about_minutes(11 * 60) == "about 11 minutes"
    assert about_minutes(43 * 60) == "about 40 minutes"
    assert about_minutes(3 * 3600) == "about 3 hours"


def test_plan_names_text_and_time(llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "one plus two"}) + "\n")
    options = ("--scheme", "W4A16", "--calibration", text, "--device", "cpu")
    ran = vexport("plan", llama, *options, "--samples", 10**9)
    assert ran.code == 0, ran.stderr
    assert_contains(ran.stdout, f"{text}, at most 1,000,000,000 samples of 512 tokens")
    assert_contains(ran.stdout, "on this CPU")
    assert f"--scheme W4A16 --calibration {text}" in ran.stdout.splitlines()[-1]
    short = vexport("plan", llama, *options, "--samples", 1)
    assert "on this CPU" not in short.stdout


def test_text_without_use_needs_no_chat_template(llama: Path, tmp_path: Path) -> None:
    """The model has no chat template. Only a plan that uses the conversations needs one."""
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    unused = vexport("plan", llama, "--scheme", "FP8_DYNAMIC", "--calibration", chats)
    assert unused.code == 0, unused.stderr
    assert "does not need the text" in unused.stderr
    used = vexport("plan", llama, "--scheme", "W4A16", "--calibration", chats)
    assert used.code != 0
    assert "chat template" in used.stderr
