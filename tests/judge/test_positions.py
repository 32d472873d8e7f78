"""Held-out text by position: buckets, KLs, noise, verdicts on the worst bucket, and reports."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special
from torch.nn import functional

from tests.judge.text_sessions import random_text, session
from tests.reports.sample import WHOLE
from tests.texts import assert_contains
from vexport.errors import EnvironmentFault
from vexport.inference.answers import ServedSession
from vexport.judge.held_out import decide_on_text, judge_limit
from vexport.judge.positions import Span, buckets_of, compare_rows, doublings_of
from vexport.judge.verdict import overall_outcome
from vexport.records import TextVerdict, Verdict
from vexport.reports import render_verdicts
from vexport.reports.formatting import next_step
from vexport.rules.verdict import LATE_LOSS
from vexport.run.comparison import compared_run
from vexport.scenario import Evaluate

SETTINGS = Evaluate(text="held-out.txt", kl_limit=0.1, nll_limit=0.05, alpha=0.05)
VOCABULARY, TOKENS, ROWS = 40, 400, 9


def ramp(start: int) -> torch.Tensor:
    """Return noise levels that grow from 0 at the token `start`, with shape (1, TOKENS - 1, 1)."""
    return torch.clamp((torch.arange(TOKENS - 1) - start) / 100, min=0)[None, :, None]


def pair(
    folder: Path, *, start: int = 200, noise: float = 1.0, again: float = 0.0
) -> tuple[ServedSession, ServedSession]:
    """Return a baseline, and a candidate whose logits get worse from the token `start` on."""
    rows, logits, generator = random_text(ROWS, TOKENS, VOCABULARY)
    other = logits + noise * ramp(start) * torch.randn(logits.shape, generator=generator)
    second = logits + again * torch.randn(logits.shape, generator=generator)
    return (
        session(folder / "a", rows, logits, top=40, again=second),
        session(folder / "b", rows, other, top=40),
    )


def text_of(verdict: Verdict) -> TextVerdict:
    assert verdict.text is not None
    return verdict.text


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (2, [2]),
        (64, [64]),
        (100, [100]),
        (128, [64, 128]),
        (300, [64, 300]),
        (512, [64, 256, 512]),
        (8191, [64, 256, 1024, 4096, 8191]),
        (70_000, [64, 256, 1024, 4096, 16384, 65536, 70_000]),
    ],
)
def test_buckets_cover_each_token_once(tokens: int, ends: list[int]) -> None:
    spans = buckets_of(tokens)
    assert [span.end for span in spans] == ends
    assert [span.start for span in spans] == [0, *ends[:-1]]
    for chosen in (spans, doublings_of(tokens)):
        places = [place for span in chosen for place in range(tokens - 1)[span.places]]
        assert places == list(range(tokens - 1))
    assert Span(64, 256).places == slice(63, 255)


def test_kl_is_exact_for_known_vocabulary(tmp_path: Path) -> None:
    rows, logits, generator = random_text(3, TOKENS, VOCABULARY)
    other = logits + 0.4 * torch.randn(logits.shape, generator=generator)
    old, new = (functional.log_softmax(each, -1).double().numpy() for each in (logits, other))
    exact = special.kl_div(np.exp(old), np.exp(new)).sum(-1)
    kls = {}
    for top in (VOCABULARY, 12, 4):
        sides = [
            session(tmp_path / f"{name}{top}", rows, each, top=top)
            for name, each in (("a", logits), ("b", other))
        ]
        compared = list(compare_rows(*sides))
        kls[top] = np.array([row.kl for row in compared])
        first = TOKENS - 1 if top == VOCABULARY else 63
        assert [row.exact for row in compared] == [first] * 3
        np.testing.assert_allclose(kls[top][:, :first], exact[:, :first], atol=1e-5)
    assert (kls[12] <= exact + 1e-5).all()
    assert kls[12].mean() > 0.6 * exact.mean()
    assert 0 < kls[4][:, 63:].mean() < kls[12][:, 63:].mean()


def test_kl_of_servers_is_a_lower_bound(tmp_path: Path) -> None:
    rows, logits, generator = random_text(3, TOKENS, VOCABULARY)
    other = logits + 0.4 * torch.randn(logits.shape, generator=generator)
    left = session(tmp_path / "a", rows, logits, top=12)
    right = session(tmp_path / "b", rows, other, top=12, is_server=True)
    assert [row.exact for row in compare_rows(left, right)] == [0, 0, 0]
    text = text_of(decide_on_text("t", left, right, SETTINGS))
    assert {limit.measure for bucket in text.buckets for limit in bucket.limits} == {
        "lower bound of the KL to the baseline",
        "rise of the NLL",
    }


def test_late_error_fails_and_names_its_bucket(tmp_path: Path) -> None:
    """The mean over all tokens would pass, and so would the first 64 tokens of each row."""
    old, new = pair(tmp_path, start=256, noise=0.75)
    verdict = decide_on_text("held-out.txt", old, new, SETTINGS)
    text = text_of(verdict)
    assert [bucket.outcome for bucket in text.buckets] == ["PASS", "PASS", "FAIL"]
    assert (verdict.outcome, verdict.warnings) == ("FAIL", (f"{LATE_LOSS.got}: {LATE_LOSS.do}",))
    assert_contains(verdict.reason, "tokens 256-400", "tokens 0-64", "tokens 64-256 pass")
    kl, rise = text.limits
    assert (kl.bucket, rise.bucket) == ((256, 400), (256, 400))
    rows = list(compare_rows(old, new))
    assert kl.value == pytest.approx(np.mean([row.kl[255:] for row in rows]))
    assert np.mean([row.kl for row in rows]) < SETTINGS.kl_limit
    report = replace(WHOLE, outcome="FAIL", verdict=verdict)
    assert next_step(report)[1].startswith("compare rope_theta")
    assert compared_run(report, "").mean_kl == kl.value
    assert text.buckets[2].candidate_nll - text.buckets[2].baseline_nll == pytest.approx(rise.value)
    assert text.buckets[2].changed == pytest.approx(np.mean([row.changed[255:] for row in rows]))
    assert sum(bucket.tokens for bucket in text.buckets) == text.tokens == ROWS * (TOKENS - 1)


def test_error_everywhere_names_the_worst_bucket(tmp_path: Path) -> None:
    old, new = pair(tmp_path, start=-300)
    verdict = decide_on_text("held-out.txt", old, new, SETTINGS)
    assert (verdict.outcome, verdict.warnings) == ("FAIL", ())
    assert "in tokens 256-400" in verdict.reason
    assert verdict.reason.endswith("all 3 buckets fail")


def test_identical_models_pass(tmp_path: Path) -> None:
    old, _ = pair(tmp_path)
    verdict = decide_on_text("held-out.txt", old, old, SETTINGS)
    assert (verdict.outcome, verdict.warnings) == ("PASS", ())
    assert "worst of 3 buckets" in verdict.reason


def test_noise_comes_from_second_reading(tmp_path: Path) -> None:
    old, new = pair(tmp_path, again=0.1)
    noises = [bucket.noise for bucket in text_of(decide_on_text("t", old, new, SETTINGS)).buckets]
    for noise in noises:
        assert noise is not None
        assert noise.rows == 2
        assert 0.001 < noise.kl < 0.01
        assert abs(noise.nll_rise) < 0.02
        assert 0 < noise.changed < 0.1


def test_large_noise_gives_no_verdict(tmp_path: Path) -> None:
    old, new = pair(tmp_path, again=0.5)
    with pytest.raises(EnvironmentFault, match=r"KL of 0\.\d+ "):
        decide_on_text("t", old, new, SETTINGS)
    same = replace(new, result=old.result)
    with pytest.raises(EnvironmentFault, match=r"candidate .*KL of 0\.\d+ "):
        decide_on_text("t", new, same, SETTINGS)


@pytest.mark.parametrize("top", [12, None])
def test_padded_vocabulary_is_compared_by_a_lower_bound(tmp_path: Path, top: int | None) -> None:
    """A checkpoint may have more rows of embeddings than its source, which no token uses."""
    rows, logits, _ = random_text(ROWS, TOKENS, VOCABULARY)
    padded = functional.pad(logits, (0, 8), value=-20.0)
    left = session(tmp_path / "a", rows, logits, top=top or VOCABULARY)
    right = session(tmp_path / "b", rows, padded, top=top or VOCABULARY + 8)
    for sides in ((left, right), (right, left)):
        verdict = decide_on_text("t", *sides, SETTINGS)
        assert verdict.outcome == "PASS"
        assert text_of(verdict).limits[0].value < 1e-5


def test_all_formats_show_buckets(tmp_path: Path) -> None:
    old, new = pair(tmp_path, again=0.01)
    verdict = decide_on_text("held-out.txt", old, new, SETTINGS)
    buckets = json.loads(render_verdicts([verdict], "json"))["text"]["buckets"]
    assert [(bucket["start"], bucket["end"]) for bucket in buckets] == [
        (0, 64),
        (64, 256),
        (256, 400),
    ]
    assert buckets[2]["limits"][0]["outcome"] == "FAIL"
    assert buckets[0]["noise"]["rows"] == 2
    for form in ("text", "markdown", "html"):
        assert "256-400" in render_verdicts([verdict], form)
    assert "tokens 256-400" in render_verdicts([verdict], "junit")
    page = render_verdicts([verdict], "html")
    assert page.count('class="chart"') == 2
    # Two NLL curves and two KL curves, with a point at 2, 4, ..., 256 and 400.
    assert page.count('class="point"') == 4 * len(text_of(verdict).curve) == 4 * 9


def test_false_fails_stay_within_alpha() -> None:
    """Both measures are at their limits in four buckets, so that each FAIL is wrong."""
    rng = np.random.default_rng(5)
    outcomes = []
    for _ in range(20):
        limits = []
        for _ in range(4):
            kls = rng.lognormal(np.log(0.1) - 0.125, 0.5, 12)
            rises = 0.05 + 0.02 * rng.standard_t(5, 12)
            limits.append(judge_limit("KL to the baseline", kls, 0.1, 0.05, 8))
            limits.append(judge_limit("rise of the NLL", rises, 0.05, 0.05, 8))
        outcomes.append(overall_outcome(limits))
    assert outcomes.count("FAIL") <= 3
    assert outcomes.count("PASS") == 0
