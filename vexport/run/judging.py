"""What both models' answers come to: drift, verdict and the cause of a loss, for `eval` and `run` alike."""

from pathlib import Path

from vexport.evaluation.attribution import attribute
from vexport.evaluation.drift import Limits, Scored, drift_warnings, measure_drift
from vexport.evaluation.held_out import TextLimits, decide_on_text
from vexport.evaluation.prompting import differences
from vexport.evaluation.verdict import decide
from vexport.run.naming import portable
from vexport.run.serving import EngineOptions, Served
from vexport.scenario import Evaluate
from vexport.types import Attribution, Drift, Outcome, Verdict

STAGE = "attribution"


def limits_of(settings: Evaluate | None) -> Limits:
    """The limits beyond which drift is a warning."""
    return Limits(kl=settings.kl_limit, nll=settings.nll_limit) if settings else Limits()


def scored_pair(baseline: Served, candidate: Served) -> tuple[Scored, Scored] | None:
    """Both sessions' log-probabilities; None where vLLM refused a model."""
    old, new = baseline.scored, candidate.scored
    return (old, new) if old and new else None


def drift_between(baseline: Served, candidate: Served, settings: Evaluate | None) -> Drift | None:
    """How far both models' log-probabilities on the same prompts are apart; None where one has none."""
    pair = scored_pair(baseline, candidate)
    return measure_drift(*pair, limits=limits_of(settings)) if pair else None


def verdict_on(baseline: Path, candidate: Path, settings: Evaluate) -> Verdict:
    """The comparison of two folders of lm-eval's, or of one with an accepted baseline."""
    return decide(
        baseline,
        candidate,
        margin=settings.margin,
        alpha=settings.alpha,
        gate=settings.gate,
    )


def verdict_on_text(baseline: Served, candidate: Served, settings: Evaluate) -> Verdict:
    """The comparison of what both models make of held-out text; CheckpointFailed where it cannot be."""
    old, new = baseline.read_text, candidate.read_text
    assert settings.text is not None
    assert old is not None
    assert new is not None
    device = candidate.result.engine.device if candidate.result.engine else ""
    limits = TextLimits(kl=settings.kl_limit, nll=settings.nll_limit, alpha=settings.alpha)
    return decide_on_text(portable(settings.text), old, new, limits, device=device)


def warnings_of(drift: Drift | None) -> tuple[str, ...]:
    """What is said of a drift beyond its limits."""
    return drift_warnings(drift) if drift else ()


def cause_of(
    baseline: Served,
    candidate: Served,
    settings: Evaluate | None,
    outcome: Outcome,
    options: EngineOptions,
) -> Attribution | None:
    """What causes a loss, given the outcome; None where vLLM refused a model."""
    pair = scored_pair(baseline, candidate)
    if pair is None:
        return None
    options.on_progress(STAGE, 0, 1)
    limit, python = limits_of(settings).kl, options.vllm_python
    attribution = attribute(*pair, limit=limit, outcome=outcome, vllm_python=python)
    options.on_progress(STAGE, 1, 1)
    return attribution


def is_in_doubt(verdict: Verdict, drift: Drift | None, baseline: Served, candidate: Served) -> bool:
    """Whether something about a comparison asks for its cause."""
    if verdict.outcome != "PASS" or drift is None or warnings_of(drift):
        return True
    pair = scored_pair(baseline, candidate)
    return pair is not None and any(differences(*pair))
