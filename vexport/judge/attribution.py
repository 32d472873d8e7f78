"""Find the cause of a loss: score the same tokens in four ways.

- (1) transformers on the baseline
- (2) vLLM on the baseline
- (3) transformers on the candidate's weights, dequantized, with rounded activations
- (4) vLLM on the candidate

The distances between these four results show the cause:

- The distance of (3) from (1) is the cost of quantization in exact arithmetic.
- The distance of (4) from (3) is large if vLLM loads other values than the file has, or multiplies
  differently.
- The distance of (2) from (1) is the noise floor: two implementations of the same model in
  bfloat16.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vexport.checks import check_checkpoint
from vexport.engine.agreement import KL_LIMITS, kl_limit, read_logprobs
from vexport.engine.dry.load import CAPABILITIES, DryLoad
from vexport.engine.reference import REFERENCE_FILE, agreement_limit, cached_reference
from vexport.errors import EnvironmentFault, InputError
from vexport.inference.answers import ServedSession
from vexport.inference.prompting import differences
from vexport.numerics.metrics import kl_divergence
from vexport.records import Attribution, Cause, Distance, OnProgress, Outcome, named, silent

NOISE_FACTOR = 3.0
"""Multiple of the noise floor above which the quantization distance explains a failed task.

This applies if no distance is above its limit. If the quantization distance is smaller than the
multiple, both models compute nearly the same. Then the cause is in the prompts, or in the
extraction of answers from the responses.
"""
MAX_POSITION_KL = 100.0
"""Maximum KL of a position, in nats.

A position with NaN has an infinite KL. It is replaced by this value, because JSON has no infinity.
The KL of two working models is far below it.
"""
_MAX_EVIDENCE = 3
ONLY_LATE_LOSS = (
    "every distance is within its limit at the first tokens of each row: the loss is at later "
    "tokens, which are not scored in four ways"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NllRise:
    """A rise of the mean NLL above its limit, in nats per token, and its parts.

    `by_quantization` is the rise from the source to the exported weights in transformers.
    `by_engine` is the rise from transformers to vLLM with the exported weights, minus the same rise
    of the baseline. Their sum is the rise in vLLM on the scored tokens.
    """

    value: float
    limit: float
    by_quantization: float = 0.0
    by_engine: float = 0.0


MODEL_NAMES = {
    1: "transformers, baseline",
    2: "vLLM, baseline",
    3: "transformers, candidate dequantized",
    4: "vLLM, candidate",
}


def attribute(
    baseline: ServedSession,
    candidate: ServedSession,
    *,
    limit: float,
    outcome: Outcome | None,
    nll_rise: NllRise | None = None,
    is_late: bool = False,
    vllm_python: Path | None = None,
    on_progress: OnProgress = silent,
) -> Attribution | None:
    """Find the cause of a loss. Return None if transformers cannot build one of the models.

    `limit` is the limit of quantization's mean KL. `outcome` is the outcome of the tasks.
    `nll_rise` is the rise of the NLL if it is above its limit. `is_late` is True if the first
    tokens of the text's rows pass, and later tokens fail. Only the first tokens are scored here.

    The two models of transformers are built in this process, unless an earlier step stored their
    scores. If vLLM disagrees with transformers on the candidate, vLLM's loaders also load the
    candidate without running it (a dry load).
    """
    of_baseline, of_candidate = named("baseline", on_progress), named("candidate", on_progress)
    harness = tuple(differences(baseline, candidate))
    if baseline.prompts.tokens != candidate.prompts.tokens:
        return Attribution(
            cause="harness",
            reason=harness[0],
            noise=None,
            quantization=None,
            engine=None,
            total=None,
            harness=harness,
        )
    try:
        scores = {1: _reference(baseline, of_baseline), 2: read_logprobs(baseline.logprobs_file)}
        scores |= {
            3: _reference(candidate, of_candidate),
            4: read_logprobs(candidate.logprobs_file),
        }
    except InputError:
        return None
    engine = _distance(scores, 3, 4, kl_limit(candidate.checkpoint))
    limit_of_engine = agreement_limit(
        candidate.checkpoint,
        candidate.prompts.tokens,
        candidate.logprobs_file.with_name(REFERENCE_FILE),
        mean_kl=engine.mean_kl,
        limit=engine.limit,
        on_progress=of_candidate,
    )
    distances = {
        "noise": _distance(scores, 1, 2, max(KL_LIMITS[16], kl_limit(baseline.checkpoint))),
        "quantization": _distance(scores, 1, 3, limit),
        "engine": replace(engine, limit=limit_of_engine),
        "total": _distance(scores, 2, 4, limit),
    }
    if nll_rise is not None:
        targets = [token for tokens in candidate.prompts.tokens for token in tokens[1:]]
        engine_rise = _rise(scores, 3, 4, targets) - _rise(scores, 1, 2, targets)
        quantization_rise = _rise(scores, 1, 3, targets)
        nll_rise = replace(nll_rise, by_quantization=quantization_rise, by_engine=engine_rise)
    needs_evidence = not harness and _exceeds_limit(distances["engine"])
    evidence = _loader_evidence(candidate, vllm_python, of_candidate) if needs_evidence else ()
    cause, reason = _find_cause(distances, harness, evidence, outcome, nll_rise, is_late=is_late)
    return Attribution(cause=cause, reason=reason, **distances, harness=harness, evidence=evidence)


def _find_cause(
    distances: dict[str, Distance],
    harness: Sequence[str],
    evidence: Sequence[str],
    outcome: Outcome | None,
    nll_rise: NllRise | None,
    *,
    is_late: bool,
) -> tuple[Cause, str]:
    """Return the cause of the loss, and a sentence that explains it.

    Differences between the prompts are examined first, then vLLM's loaders and kernels, and
    quantization last.
    """
    noise, quantization, engine = distances["noise"], distances["quantization"], distances["engine"]
    if harness:
        return "harness", f"the models get different prompts: {harness[0]}"
    if _exceeds_limit(engine):
        words = f"vLLM differs from transformers with the same weights by {_kl_with_limit(engine)}"
        if evidence:
            return (
                "loader",
                f"{words}, because it loads other values than the file has: {evidence[0]}",
            )
        also = "; the baseline differs too" if _exceeds_limit(noise) else ""
        return "kernel", f"{words}, although it loads all values as they are stored{also}"
    if _exceeds_limit(quantization):
        return (
            "quantization",
            f"the exported weights differ from the source's by {_kl_with_limit(quantization)}",
        )
    if nll_rise is not None and not is_late:
        return _cause_of_rise(nll_rise)
    if outcome != "FAIL":
        return "none", "quantization, engine and noise are all within their limits"
    if is_late:
        return "none", ONLY_LATE_LOSS
    if quantization.mean_kl > NOISE_FACTOR * noise.mean_kl:
        return "quantization", (
            "the tasks fail, and only the exported weights exceed the noise floor: they differ "
            f"from the source's by {_kl_with_limit(quantization)}"
        )
    return "harness", (
        "the tasks fail, but all four log-probabilities agree: compare the prompts of both models, "
        "and how lm-eval extracts the answers from their responses"
    )


def _rise(
    scores: dict[int, torch.Tensor], reference: int, measured: int, targets: Sequence[int]
) -> float:
    """Return the rise of the mean NLL of the tokens `targets`, one for each row of the scores."""
    chosen = torch.tensor(targets)[:, None]
    old, new = (scores[number].gather(1, chosen) for number in (reference, measured))
    return float((old - new).mean())


def _cause_of_rise(rise: NllRise) -> tuple[Cause, str]:
    """Return the larger part of a rise of the NLL as its cause. No KL is above its limit."""
    words = (
        f"the NLL rises by {rise.value:.3g} nats per token (limit {rise.limit:g}), although every "
        f"KL is within its limit: by {rise.by_quantization:.3g} from the source to the exported "
        f"weights in transformers, and by {rise.by_engine:.3g} more in vLLM"
    )
    return "quantization" if rise.by_quantization >= rise.by_engine else "kernel", words


def _reference(side: ServedSession, on_progress: OnProgress) -> torch.Tensor:
    file = side.logprobs_file.with_name(REFERENCE_FILE)
    return cached_reference(side.checkpoint, side.prompts.tokens, file, on_progress)


def _distance(
    scores: dict[int, torch.Tensor], reference: int, measured: int, limit: float
) -> Distance:
    kl = kl_divergence(scores[reference], scores[measured]).clamp(max=MAX_POSITION_KL)
    return Distance(
        reference=MODEL_NAMES[reference],
        measured=MODEL_NAMES[measured],
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        limit=limit,
    )


def _exceeds_limit(distance: Distance) -> bool:
    return distance.mean_kl > distance.limit


def _kl_with_limit(distance: Distance) -> str:
    return f"{distance.mean_kl:.3g} nats per token (limit {distance.limit:g})"


def _loader_evidence(
    candidate: ServedSession, vllm_python: Path | None, on_progress: OnProgress
) -> tuple[str, ...]:
    """Return differences between stored and loaded values.

    The static check and a dry load with vLLM's loaders find these differences. If the dry load
    cannot run, only the static check is used.
    """
    findings = list(check_checkpoint(str(candidate.checkpoint)).findings)
    with suppress(EnvironmentFault):
        load = DryLoad(
            checkpoints=[candidate.checkpoint],
            sm=CAPABILITIES,
            require="any",
            vllm_python=vllm_python,
        )
        (dry,) = load.reports(on_progress)
        findings += dry.findings
    errors = [finding for finding in findings if finding.severity == "error"]
    return tuple(str(finding) for finding in errors[:_MAX_EVIDENCE])
