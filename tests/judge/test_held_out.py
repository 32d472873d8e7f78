"""Verdicts on held-out text: bounds, outcomes, and sentences of the reports."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from safetensors.torch import load_file, save_file

from tests.judge.text_sessions import random_text, session
from tests.texts import breaks
from vexport.inference.answers import ServedSession
from vexport.judge.held_out import (
    acceptance_loss,
    decide_on_text,
    judge_limit,
    mean_bounds,
)
from vexport.records import DraftCounts
from vexport.reports import render_verdicts
from vexport.rules import verdict as rules
from vexport.scenario import Evaluate

SETTINGS = Evaluate(text="held-out.txt", kl_limit=0.1, nll_limit=0.05, alpha=0.05)
DRAFTING = SETTINGS.model_copy(update={"speculative": "mtp"})
VOCABULARY, TOKENS, KL_TOKENS = 50, 40, 10


def models(folder: Path, count: int, noise: float) -> tuple[ServedSession, ServedSession]:
    """Return a baseline that predicts its text well, and a candidate with noise on its logits."""
    rows, logits, generator = random_text(count, TOKENS, VOCABULARY)
    other = logits + noise * torch.randn(logits.shape, generator=generator)
    return (
        session(folder / "a", rows, logits, beginning=KL_TOKENS, top=VOCABULARY),
        session(folder / "b", rows, other, beginning=KL_TOKENS, top=VOCABULARY),
    )


@pytest.mark.parametrize(
    ("rows", "noise", "outcome"),
    [
        (32, 0.05, "PASS"),
        (32, 1.0, "FAIL"),
        (12, 0.45, "INCONCLUSIVE"),
        (5, 0.05, "INCONCLUSIVE"),
        (1, 0.05, "INCONCLUSIVE"),
    ],
)
def test_held_out_text_decides(tmp_path: Path, rows: int, noise: float, outcome: str) -> None:
    old, new = models(tmp_path, rows, noise)
    verdict = decide_on_text("held-out.txt", old, new, SETTINGS)
    assert (verdict.outcome, verdict.tasks) == (outcome, ())
    text = verdict.text
    assert text is not None
    assert (text.rows, text.tokens) == (rows, rows * (TOKENS - 1))
    first, second = text.limits
    assert first.measure == "KL to the baseline"
    assert second.value == pytest.approx(text.candidate_nll - text.baseline_nll, abs=1e-5)
    if rows < 8:
        assert "needs at least" in verdict.reason
        assert {limit.rows_needed for limit in text.limits} == {8}
    if outcome == "FAIL":
        assert verdict.reason.startswith("KL to the baseline")
        assert "limit 0.1" in verdict.reason
    answer = json.loads(render_verdicts([verdict], "json"))
    assert ([limit["outcome"] for limit in answer["text"]["limits"]].count("PASS") == 2) == (
        outcome == "PASS"
    )
    printed = render_verdicts([verdict], "text")
    assert outcome in printed
    assert "KL to the baseline" in printed
    junit = render_verdicts([verdict], "junit")
    assert junit.count("<testcase") == 3
    assert ("<failure" in junit) == (outcome != "PASS")
    assert "text (rise of the NLL)" in junit


def test_different_tokens_and_non_finite_scores_fail(
    tmp_path: Path,
) -> None:
    old, new = models(tmp_path, 9, 0.1)
    moved = replace(new, rows=(*new.rows[:4], new.rows[0], *new.rows[5:]))
    with breaks(rules.TEXT_TOKENS, "row 5"):
        decide_on_text("held-out.txt", old, moved, SETTINGS)
    tables = load_file(new.logprobs_file)
    tables["prompt.3"][2, 1] = float("nan")
    save_file(tables, new.logprobs_file)
    with breaks(rules.TEXT_NUMBERS):
        decide_on_text("held-out.txt", old, new, SETTINGS)


def test_false_passes_of_skewed_rows_are_rare() -> None:
    """Rows have lognormal KLs whose true mean equals the limit, so that each PASS is false."""
    rng = np.random.default_rng(1)
    draws = rng.lognormal(-2.3 - 0.18, 0.6, (150, 24))
    limit = float(np.exp(-2.3))
    outcomes = [judge_limit("KL to the baseline", draw, limit, 0.05).outcome for draw in draws]
    assert outcomes.count("PASS") / len(draws) < 0.11
    assert outcomes.count("FAIL") / len(draws) < 0.06
    assert mean_bounds(np.full(9, 0.25), 0.05) == (0.25, 0.25)
    assert mean_bounds(np.array([0.25]), 0.05) is None


def drafts(accepted: ArrayLike, steps: ArrayLike) -> tuple[DraftCounts, ...]:
    pairs = zip(np.asarray(steps).tolist(), np.asarray(accepted).tolist(), strict=True)
    return tuple(DraftCounts(drafts=n, draft_tokens=3 * n, accepted_tokens=k) for n, k in pairs)


def drafting(side: ServedSession, counts: tuple[DraftCounts, ...]) -> ServedSession:
    return replace(side, result=replace(side.result, drafts=counts))


def test_acceptance_length_loss_equals_bootstrap() -> None:
    """Compare the loss of acceptance length and its standard error with a bootstrap over rows."""
    rng = np.random.default_rng(3)
    steps, more = rng.integers(30, 80, 60), rng.integers(0, 9, 60)
    old, new = rng.binomial(3 * steps, 0.5), rng.binomial(3 * (steps + more), 0.45)
    parts = acceptance_loss(drafts(old, steps), drafts(new, steps + more))

    def fall(chosen: np.ndarray) -> float:
        before = 1 + old[chosen].sum() / steps[chosen].sum()
        return float(1 - (1 + new[chosen].sum() / (steps + more)[chosen].sum()) / before)

    resampled = [fall(rng.integers(0, 60, 60)) for _ in range(4000)]
    assert parts.mean() == pytest.approx(fall(np.arange(60)), abs=1e-12)
    assert parts.std(ddof=1) / 60**0.5 == pytest.approx(np.std(resampled), rel=0.05)


@pytest.mark.parametrize(
    ("rate", "outcome"), [(0.6, "PASS"), (0.5, "FAIL"), (0.555, "INCONCLUSIVE")]
)
def test_drafts_decide_with_the_text(tmp_path: Path, rate: float, outcome: str) -> None:
    old, new = models(tmp_path, 32, 0.05)
    rng, steps = np.random.default_rng(1), [60] * 32
    old = drafting(old, drafts(rng.binomial(180, 0.6, 32), steps))
    new = drafting(new, drafts(rng.binomial(180, rate, 32), steps))
    verdict = decide_on_text("held-out.txt", old, new, DRAFTING)
    assert verdict.outcome == outcome, verdict.reason
    assert verdict.text is not None
    assert verdict.text.acceptance is not None
    assert verdict.text.acceptance.baseline == pytest.approx(1 + 3 * 0.6, abs=0.05)
    assert [limit.outcome for limit in verdict.text.limits] == ["PASS", "PASS", outcome]
    for form in ("text", "markdown", "html", "junit"):
        assert "fall of the acceptance length" in render_verdicts([verdict], form)
    with breaks(rules.NO_DRAFTS, "32 prompts"):
        decide_on_text("t", old, drafting(new, drafts([0] * 32, [0] * 32)), DRAFTING)
