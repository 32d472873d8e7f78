"""Attribution of a loss to a cause.

transformers' results are real. vLLM's results are computed from them. Tests in tests/run use the
real vLLM.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.judge.faults import (
    DEMO,
    TEMPLATE,
    WRONG_TEMPLATE,
    with_swapped_scales,
    with_template,
    with_unequal_global_scales,
)
from tests.models import quantize
from tests.texts import assert_contains
from vexport.engine.messages import SessionResult
from vexport.engine.reference import reference_logprobs
from vexport.inference.answers import ServedSession
from vexport.inference.prompts import Prompts, fixed_prompts
from vexport.judge.attribution import NllRise, attribute
from vexport.records import Attribution, Outcome

TEXTS = (
    "4 7 + 3 8 = 5 8 0 . the tool of taruna is lever .",
    "the city of ruvek is osaka . 1 1 + 5 1 = 2 6 0 .",
)
NO_VLLM = Path("/nonexistent/python")
LIMIT = 0.1


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return fixed_prompts(DEMO / "model", texts=TEXTS)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(DEMO / "model", tmp_path_factory.mktemp("export") / "model", "NVFP4A16")


@cache
def computed(checkpoint: Path, tokens: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """Compute transformers' results once for each checkpoint."""
    return reference_logprobs(checkpoint, tokens)


def session_of(
    checkpoint: Path, prompts: Prompts, folder: Path, *, by: Path, noise: float = 0.0
) -> ServedSession:
    """Return a session on `checkpoint` with the results of the checkpoint `by`.

    Gaussian noise of standard deviation `noise` is added to the logits.
    """
    folder.mkdir(parents=True)
    matrix = computed(by, prompts.tokens)
    matrix = matrix + noise * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(0))
    rows = torch.split(torch.log_softmax(matrix, dim=-1), [len(ids) - 1 for ids in prompts.tokens])
    tensors = {f"prompt.{number}": row.clone() for number, row in enumerate(rows)}
    save_file(tensors, folder / "logprobs.safetensors")
    file = folder / "logprobs.safetensors"
    result = SessionResult(checkpoint=checkpoint, platform="cpu", logprobs_file=file)
    return ServedSession(result=result, prompts=prompts)


def attribution_of(
    folder: Path,
    prompts: Prompts,
    candidate: Path,
    *,
    by: Path,
    outcome: Outcome = "FAIL",
    is_late: bool = False,
    nll_rise: NllRise | None = None,
    limit: float = LIMIT,
    baseline: Path = DEMO / "model",
) -> Attribution:
    """Attribute the loss of `candidate`, whose vLLM results are made from the checkpoint `by`."""
    found = attribute(
        session_of(baseline, prompts, folder / "baseline", by=baseline, noise=0.02),
        session_of(candidate, prompts, folder / "candidate", by=by, noise=0.02),
        limit=limit,
        outcome=outcome,
        is_late=is_late,
        nll_rise=nll_rise,
        vllm_python=NO_VLLM,
    )
    assert found is not None
    return found


def test_sound_export_blames_quantization_or_nothing(
    tmp_path: Path, prompts: Prompts, export: Path
) -> None:
    assert attribution_of(tmp_path / "failed", prompts, export, by=export).cause == "quantization"
    found = attribution_of(tmp_path / "passed", prompts, export, by=export, outcome="PASS")
    assert found.cause == "none"
    assert found.noise
    assert found.engine
    assert found.quantization
    assert found.total
    share = computed(DEMO / "model", prompts.tokens).exp()
    expected = (
        0.02**2 / 2 * float((1 - share.square().sum(-1)).mean())
    )  # KL that Gaussian noise of 0.02 on the logits causes
    assert found.noise.mean_kl == pytest.approx(expected, rel=0.5)
    assert found.engine.mean_kl < found.engine.limit
    assert found.noise.mean_kl < found.quantization.mean_kl < LIMIT
    assert found.total.mean_kl == pytest.approx(found.quantization.mean_kl, rel=0.3)


@pytest.mark.parametrize("outcome", ["PASS", "INCONCLUSIVE", "FAIL"])
def test_rise_of_nll_has_a_cause(
    outcome: Outcome, tmp_path: Path, prompts: Prompts, export: Path
) -> None:
    """A rise above its limit is never explained by distances that are all within their limits."""
    # The demo model is trained on answers alone, so its broken export predicts whole texts better.
    better = with_swapped_scales(export, tmp_path / "swapped")
    rise = NllRise(value=0.07, limit=0.05)
    found = attribution_of(
        tmp_path,
        prompts,
        export,
        by=export,
        outcome=outcome,
        nll_rise=rise,
        limit=100,
        baseline=better,
    )
    assert found.cause == "quantization"
    assert_contains(found.reason, "NLL rises by 0.07", "limit 0.05")
    targets = torch.tensor([token for ids in prompts.tokens for token in ids[1:]])
    old, new = (
        torch.log_softmax(computed(model, prompts.tokens), dim=-1).gather(1, targets[:, None])
        for model in (better, export)
    )
    assert_contains(found.reason, f"by {float((old - new).mean()):.3g} from the source")


def test_swapped_scales_blame_quantization(tmp_path: Path, prompts: Prompts, export: Path) -> None:
    broken = with_swapped_scales(export, tmp_path / "swapped")
    found = attribution_of(tmp_path, prompts, broken, by=broken)
    assert found.cause == "quantization"
    assert found.quantization
    assert found.engine
    assert found.quantization.mean_kl > LIMIT
    assert found.engine.mean_kl < found.engine.limit


def test_deviating_engine_blames_kernel(tmp_path: Path, prompts: Prompts, export: Path) -> None:
    """vLLM's results differ from transformers' results on a sound export."""
    found = attribution_of(
        tmp_path, prompts, export, by=with_swapped_scales(export, tmp_path / "swapped")
    )
    assert found.cause == "kernel"
    assert found.engine
    assert found.quantization
    assert found.engine.mean_kl > found.engine.limit
    assert found.quantization.mean_kl < LIMIT
    assert_contains(found.reason, "vLLM differs", "transformers", "loads all values")


def test_broken_loader_rule_blames_loader(tmp_path: Path, prompts: Prompts, export: Path) -> None:
    broken = with_unequal_global_scales(export, tmp_path / "own")
    found = attribution_of(
        tmp_path, prompts, broken, by=with_swapped_scales(export, tmp_path / "swapped")
    )
    assert found.cause == "loader"
    assert "global_scale" in found.evidence[0]
    assert found.evidence[0] in found.reason
    assert found.quantization
    assert found.quantization.mean_kl < LIMIT  # the export itself is sound


def test_wrong_chat_template_blames_harness(tmp_path: Path, prompts: Prompts, export: Path) -> None:
    right = with_template(DEMO / "model", tmp_path / "right", TEMPLATE)
    wrong = with_template(export, tmp_path / "wrong", WRONG_TEMPLATE)
    found = attribution_of(tmp_path, prompts, wrong, by=export, baseline=right)
    assert found.cause == "harness"
    assert "chat template: from character" in found.reason
    same = with_template(export, tmp_path / "same", TEMPLATE)
    assert (
        attribution_of(
            tmp_path / "again", prompts, same, by=export, baseline=right, outcome="PASS"
        ).harness
        == ()
    )


def test_different_tokens_blame_harness(tmp_path: Path, prompts: Prompts) -> None:
    """Different tokens make the distances meaningless, so none is measured."""
    model = DEMO / "model"
    session = session_of(model, prompts, tmp_path / "one", by=model)
    other = replace(
        session, prompts=replace(prompts, tokens=tuple(ids[::-1] for ids in prompts.tokens))
    )
    found = attribute(session, other, limit=LIMIT, outcome="FAIL", vllm_python=NO_VLLM)
    assert found is not None
    assert (found.cause, found.engine) == ("harness", None)
    assert_contains(found.reason, "tokenizer", "prompt", "tokens")


def test_failure_without_distance_blames_harness(tmp_path: Path, prompts: Prompts) -> None:
    """If all log-probabilities agree, the harness caused the failure.

    NaN from the engine blames the kernel.
    """
    model = DEMO / "model"
    found = attribution_of(tmp_path, prompts, DEMO / "model-x16", by=DEMO / "model-x16")
    assert found.cause == "harness"
    assert_contains(found.reason, "log-probabilities agree")
    hard = DEMO / "model-x16"
    late = attribution_of(tmp_path / "late", prompts, hard, by=hard, is_late=True)
    assert late.cause == "none"
    assert_contains(late.reason, "later tokens")
    baseline = session_of(model, prompts, tmp_path / "nan" / "a", by=model)
    candidate = session_of(model, prompts, tmp_path / "nan" / "b", by=model, noise=float("nan"))
    broken = attribute(baseline, candidate, limit=LIMIT, outcome="FAIL", vllm_python=NO_VLLM)
    assert broken is not None
    assert broken.engine
    assert (broken.cause, broken.engine.mean_kl) == ("kernel", 100)
