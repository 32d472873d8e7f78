"""The comparison of both models' answers: drift, verdict and the cause of a loss, for `eval` and `run`
alike.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from vexport.evaluation.attribution import attribute
from vexport.evaluation.drift import Limits, measure_drift
from vexport.evaluation.held_out import decide_on_text
from vexport.evaluation.verdict import decide
from vexport.records import Attribution, Drift, OnProgress, Outcome, Verdict, named
from vexport.reports.formatting import outcome_line
from vexport.run.directory import portable
from vexport.run.serving import EngineOptions, Served
from vexport.scenario import Evaluate

DEFAULT_SECONDS = 300
LOG = logging.getLogger(__name__)


class _OutOfTime(Exception):
    """The time for an explanation is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explaining:
    """The search for the cause of a loss after the verdict, which takes so many seconds at most.

    Without `wanted` there is one unless the verdict is PASS.
    """

    wanted: bool | None = None
    seconds: float = DEFAULT_SECONDS

    def is_due(self, outcome: Outcome) -> bool:
        """Return whether to look for the cause of this outcome."""
        return outcome != "PASS" if self.wanted is None else self.wanted


def drift_between(baseline: Served, candidate: Served, settings: Evaluate | None) -> Drift | None:
    """The drift between both models' log-probabilities on the same prompts; None where vLLM refused one."""
    if not baseline.scored or not candidate.scored:
        return None
    limits = Limits(kl=settings.kl_limit, nll=settings.nll_limit) if settings else Limits()
    return measure_drift(baseline.scored, candidate.scored, limits=limits)


def first_line(verdict: Verdict) -> str:
    """Return the outcome in a line, before anything is explained."""
    return f"accuracy: {outcome_line(verdict.outcome, verdict.device)}: {verdict.reason}"


def verdict_of(
    settings: Evaluate, answers: tuple[Path, Path], baseline: Served | None, candidate: Served | None
) -> Verdict:
    """The comparison of both models' answers to tasks, or of what they make of the text that decides.

    `answers` are folders of lm-eval's, or an accepted baseline and one; CheckpointFailed where a text cannot
    be compared.
    """
    if settings.text is None:
        return decide(*answers, margin=settings.margin, alpha=settings.alpha, gate=settings.gate)
    old, new = baseline.read_text if baseline else None, candidate.read_text if candidate else None
    assert old is not None
    assert new is not None
    device = candidate.result.engine.device if candidate and candidate.result.engine else ""
    limits = Limits(kl=settings.kl_limit, nll=settings.nll_limit, alpha=settings.alpha)
    return decide_on_text(
        portable(settings.text), old, new, limits, device=device, speculative=settings.speculative or ""
    )


def cause_of(
    baseline: Served,
    candidate: Served,
    settings: Evaluate | None,
    outcome: Outcome,
    options: EngineOptions,
    seconds: float = DEFAULT_SECONDS,
) -> Attribution | None:
    """Find the cause of a loss, given the outcome; None where vLLM refused a model, or time ran out."""
    if not baseline.scored or not candidate.scored:
        return None
    try:
        return attribute(
            baseline.scored,
            candidate.scored,
            limit=settings.kl_limit if settings else Limits().kl,
            outcome=outcome,
            vllm_python=options.vllm_python,
            on_progress=_until(time.monotonic() + seconds, named("attribution", options.on_progress)),
        )
    except _OutOfTime:
        LOG.info("attribution: stopped after %g s (--attribution-seconds); the verdict stands", seconds)
        return None


def _until(deadline: float, on_progress: OnProgress) -> OnProgress:
    """Report progress, and raise _OutOfTime once the deadline is over."""

    def tell(stage: str, done: int, total: int) -> None:
        if time.monotonic() > deadline:
            raise _OutOfTime
        on_progress(stage, done, total)

    return tell
