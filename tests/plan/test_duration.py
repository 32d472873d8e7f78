"""The time of calibration that is estimated before it begins."""

import json
import math
from pathlib import Path

import pytest

from tests.command import vexport
from tests.texts import assert_contains
from vexport.api import plan
from vexport.formats.plan import Plan
from vexport.numerics.speed import cpu_flops
from vexport.plan.duration import (
    EFFICIENCY,
    about_minutes,
    calibration_seconds,
    calibration_steps,
    calibration_work,
    duration_line,
    with_text,
)
from vexport.plan.rules import enough_tokens
from vexport.records.calibration import CALIBRATE, GRADIENTS, ROUND


@pytest.fixture(scope="module")
def refit(llama: Path) -> Plan:
    return plan(llama, scheme="W4A16", has_text=True)


def test_steps_of_a_plan(llama: Path, refit: Plan) -> None:
    assert calibration_steps(refit) == (GRADIENTS, ROUND)
    static = plan(llama, scheme="FP8", has_text=True)
    assert calibration_steps(static) == (CALIBRATE,)
    nearest = plan(llama, scheme="W4A16")
    assert with_text(nearest).groups[0].rounding == "refit"
    assert with_text(static).groups == static.groups


def test_work_counts_tokens_and_weights(refit: Plan) -> None:
    """Gradients use a few rows. Rounding has a part that does not depend on the text."""
    small, large = (calibration_work(refit, samples=samples, seq_len=64) for samples in (8, 800))
    assert small[GRADIENTS] == large[GRADIENTS]
    assert small[ROUND] < large[ROUND] < 100 * small[ROUND]
    seconds = calibration_seconds(refit, samples=8, seq_len=64, flops=1e9)
    assert seconds == pytest.approx((small[GRADIENTS] + small[ROUND]) / 1e9 / EFFICIENCY)


def test_only_long_calibrations_have_a_line(refit: Plan) -> None:
    size = {"samples": 128, "seq_len": 512}
    seconds = calibration_seconds(refit, flops=1, **size)
    assert duration_line(refit, flops=seconds / 119, **size) is None
    line = duration_line(refit, flops=seconds / 2400, **size)
    assert line is not None
    assert_contains(line, "about 40 minutes", "`--samples 16 --seq-len 256`", "16 samples of 256")
    trial = {"samples": 16, "seq_len": 256}
    line = duration_line(refit, flops=calibration_seconds(refit, flops=1, **trial) / 900, **trial)
    assert line is not None
    assert_contains(line, "about 15 minutes")
    assert "--samples" not in line


def test_first_try_has_enough_tokens(refit: Plan) -> None:
    """No warning about too few tokens follows. Shorter samples make more of them necessary."""
    columns = max(group.members[0].in_features for group in refit.groups)
    for seq_len, samples in ((512, 16), (32, math.ceil(enough_tokens(columns) / 32))):
        size = {"samples": 4096, "seq_len": seq_len}
        flops = calibration_seconds(refit, flops=1, **size) / 3600
        line = duration_line(refit, flops=flops, **size)
        assert line is not None
        assert f"--samples {samples} --seq-len {min(seq_len, 256)}`" in line


def test_first_try_of_few_long_samples(refit: Plan) -> None:
    """If there are fewer samples than a first try needs, the samples stay longer."""
    columns = max(group.members[0].in_features for group in refit.groups)
    size = {"samples": 2, "seq_len": 8 * enough_tokens(columns)}
    line = duration_line(refit, flops=calibration_seconds(refit, flops=1, **size) / 3600, **size)
    assert line is not None
    assert f"--samples 2 --seq-len {max(256, math.ceil(enough_tokens(columns) / 2))}`" in line


def test_minutes_in_words() -> None:
    assert about_minutes(20) == "about 1 minute"
    assert about_minutes(11 * 60) == "about 11 minutes"
    assert about_minutes(43 * 60) == "about 40 minutes"
    assert about_minutes(3 * 3600) == "about 3 hours"


def test_speed_is_measured_once() -> None:
    assert cpu_flops() > 1e7
    assert cpu_flops() == cpu_flops()


def test_plan_names_text_and_time(llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "one plus two"}) + "\n")
    options = ("--scheme", "W4A16", "--calibration", text, "--device", "cpu")
    ran = vexport("plan", llama, *options, "--samples", 10**9)
    assert ran.code == 0, ran.stderr
    assert f"{text}, at most 1,000,000,000 samples of 512 tokens" in ran.stdout
    assert_contains(ran.stdout, "on this CPU", "`--samples 16 --seq-len 256`")
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
