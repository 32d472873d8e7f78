"""KL and NLL of two models on the same tokens, compared with torch, and their warnings."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from tests.texts import assert_contains
from vexport.engine.messages import SessionResult
from vexport.inference.answers import ServedSession
from vexport.inference.prompts import Prompts, fixed_prompts
from vexport.judge.drift import drift_warnings, least_kl, measure_drift
from vexport.numerics.metrics import kl_divergence
from vexport.scenario import Evaluate

DEMO = Path(__file__).parents[2] / "scenarios" / "demo" / "model"
TEXTS = ("4 7 + 3 8 = 5 8 0 .", "the tool of taruna is lever .", "the city of ruvek is osaka .")
VOCABULARY = 384
SETTINGS = Evaluate(tasks=("any",))


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return fixed_prompts(DEMO, texts=TEXTS)


def session_with(folder: Path, prompts: Prompts, logits: list[torch.Tensor]) -> ServedSession:
    """Return a session whose log-probabilities come from the given logits."""
    folder.mkdir()
    tensors = {
        f"prompt.{number}": functional.log_softmax(prompt_logits, -1)
        for number, prompt_logits in enumerate(logits)
    }
    save_file(tensors, folder / "logprobs.safetensors")
    result = SessionResult(
        checkpoint=DEMO, platform="cpu", logprobs_file=folder / "logprobs.safetensors"
    )
    return ServedSession(result=result, prompts=prompts)


def random_logits(prompts: Prompts, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(ids) - 1, VOCABULARY, generator=generator) for ids in prompts.tokens]


def test_kl_and_nll_equal_torchs(tmp_path: Path, prompts: Prompts) -> None:
    """Compare the values of each token, of each prompt, and of all prompts."""
    old = random_logits(prompts)
    new = [
        prompt_logits + scale * torch.randn_like(prompt_logits)
        for prompt_logits, scale in zip(old, (0.1, 0.8, 0.3), strict=True)
    ]
    drift = measure_drift(
        session_with(tmp_path / "a", prompts, old),
        session_with(tmp_path / "b", prompts, new),
        SETTINGS,
    )
    assert drift is not None
    assert (drift.prompts, drift.positions) == (3, sum(map(len, old)))
    assert [prompt.prompt for prompt in drift.worst] == [TEXTS[1], TEXTS[2], TEXTS[0]]
    assert [token.token for token in drift.worst[0].tokens] == TEXTS[1].split()  # after <bos>
    kls, costs = [], []
    for text, before, after in zip(TEXTS, old, new, strict=True):
        left, right = (functional.log_softmax(logits.double(), -1) for logits in (before, after))
        kl = functional.kl_div(right, left, log_target=True, reduction="none").sum(-1)
        ids = torch.tensor(prompts.tokens[TEXTS.index(text)][1:])
        nll = functional.cross_entropy(after, ids, reduction="none")
        shown = next(prompt for prompt in drift.worst if prompt.prompt == text)
        assert [token.kl for token in shown.tokens] == pytest.approx(kl.tolist(), abs=1e-6)
        assert [token.candidate_nll for token in shown.tokens] == pytest.approx(
            nll.tolist(), abs=1e-5
        )
        assert shown.kl == pytest.approx(float(kl.mean()), abs=1e-6)
        kls.append(kl)
        costs.append(nll)
    assert drift.mean_kl == pytest.approx(float(torch.cat(kls).mean()), abs=1e-6)
    assert drift.max_kl == pytest.approx(float(torch.cat(kls).max()), abs=1e-6)
    assert drift.candidate_nll == pytest.approx(float(torch.cat(costs).mean()), abs=1e-5)
    agree = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in zip(old, new, strict=True)])
    assert drift.top1_agreement == pytest.approx(float(agree.double().mean()))


def test_same_model_does_not_drift(tmp_path: Path, prompts: Prompts) -> None:
    """Drift is not measured if the prompts differ or a log-probability is not finite."""
    session = session_with(tmp_path / "a", prompts, random_logits(prompts))
    drift = measure_drift(session, session, SETTINGS)
    assert drift is not None
    assert (drift.mean_kl, drift.max_kl, drift.top1_agreement) == (0, 0, 1)
    assert drift_warnings(drift) == ()
    fewer = replace(prompts, tokens=prompts.tokens[:2])
    short = session_with(tmp_path / "b", fewer, random_logits(fewer))
    part = measure_drift(short, short, SETTINGS)
    assert part is not None
    assert part.digest != drift.digest
    assert measure_drift(session, short, SETTINGS) is None
    broken = [torch.full_like(part, float("nan")) for part in random_logits(prompts)]
    nan = session_with(tmp_path / "c", prompts, broken)
    assert measure_drift(session, nan, SETTINGS) is None
    assert measure_drift(nan, session, SETTINGS) is None


def test_each_limit_warns_separately(tmp_path: Path, prompts: Prompts) -> None:
    old, new = (
        session_with(tmp_path / name, prompts, random_logits(prompts, seed))
        for seed, name in enumerate("ab")
    )
    drift = measure_drift(old, new, SETTINGS.model_copy(update={"kl_limit": 0.1, "nll_limit": 100}))
    assert drift is not None
    (warning,) = drift_warnings(drift)
    assert_contains(warning, "mean KL", f"{drift.mean_kl:.3g}", "0.1")
    worse = replace(drift, baseline_nll=0.0, candidate_nll=0.2, mean_kl=0.0, nll_limit=0.05)
    (warning,) = drift_warnings(worse)
    assert_contains(warning, "NLL", "baseline's", "0.2", "0.05")
    assert drift_warnings(replace(worse, baseline_nll=0.4)) == ()


def test_kl_of_top_tokens_is_lower_bound() -> None:
    """Servers return only the most likely tokens. Their KL is at most the exact KL."""
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(200, 300, generator=generator).mul(3).log_softmax(-1) for _ in range(2))
    exact = kl_divergence(old, new)
    torch.testing.assert_close(least_kl(old, new), exact, atol=1e-5, rtol=1e-5)
    top_tokens = [
        side.masked_fill(side < side.topk(20).values[:, -1:], torch.nan) for side in (old, new)
    ]
    for first, second in (
        (top_tokens[0], top_tokens[1]),
        (old, top_tokens[1]),
        (top_tokens[0], new[:, :299].log_softmax(-1)),
    ):
        assert bool((least_kl(first, second) >= 0).all())
    assert bool((least_kl(*top_tokens) <= exact + 1e-6).all())
    assert float(least_kl(old, top_tokens[1]).mean()) > 0.1 * float(exact.mean())
