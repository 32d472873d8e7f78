"""Judge two models by their responses, and search for the cause of a loss."""

import logging
import time
from dataclasses import replace

from vexport.inference.answers import Answers, ServedSession
from vexport.inference.fingerprint import read_fingerprint
from vexport.inference.options import EngineOptions
from vexport.judge.attribution import NllRise, attribute
from vexport.judge.held_out import decide_on_text
from vexport.judge.verdict import decide
from vexport.records import Attribution, Outcome, Verdict, named
from vexport.reports.formatting import outcome_line
from vexport.run.directory import portable
from vexport.scenario import Evaluate

LOG = logging.getLogger(__name__)


class _OutOfTime(Exception):
    """Raised to stop the search when its time is over."""


def outcome_and_reason(verdict: Verdict) -> str:
    """Return the outcome and its reason in a single line."""
    return f"accuracy: {outcome_line(verdict.outcome, verdict.device)}: {verdict.reason}"


def verdict_of(
    settings: Evaluate,
    baseline: Answers,
    candidate: Answers,
) -> Verdict:
    """Compare both models' responses to tasks, or their log-probabilities of `settings.text`.

    The baseline's results may be an accepted baseline. Raises CheckpointFailed if the
    log-probabilities of the text cannot be compared.
    """
    if settings.text is None:
        return decide(
            baseline.results,
            candidate.results,
            margin=settings.margin,
            alpha=settings.alpha,
            gate=settings.gate,
        )
    assert baseline.served is not None
    assert candidate.served is not None
    verdict = decide_on_text(portable(settings.text), baseline.served, candidate.served, settings)
    return replace(
        verdict,
        fingerprint=read_fingerprint(candidate.results),
        baseline_fingerprint=read_fingerprint(baseline.results),
    )


def cause_of(
    baseline: ServedSession,
    candidate: ServedSession,
    settings: Evaluate,
    outcome: Outcome,
    options: EngineOptions,
    seconds: float,
    *,
    nll_rise: float | None,
    is_late: bool,
) -> Attribution | None:
    """Find the cause of a loss, given the outcome.

    `nll_rise` is the rise of the NLL in nats per token, if it was measured. `is_late` is True if
    the first tokens of each row pass and later tokens fail. Returns None if vLLM refused a model,
    or if the search took more than `seconds`.
    """
    if not baseline.is_scored or not candidate.is_scored:
        return None
    deadline = time.monotonic() + seconds
    on_progress = named("attribution", options.on_progress)

    def report_progress(stage: str, done: int, total: int) -> None:
        if time.monotonic() > deadline:
            raise _OutOfTime
        on_progress(stage, done, total)

    try:
        return attribute(
            baseline,
            candidate,
            limit=settings.kl_limit,
            outcome=outcome,
            nll_rise=NllRise(value=nll_rise, limit=settings.nll_limit)
            if nll_rise is not None and nll_rise > settings.nll_limit
            else None,
            is_late=is_late,
            vllm_python=options.vllm_python,
            on_progress=report_progress,
        )
    except _OutOfTime:
        LOG.info(
            "attribution: stopped after %g s (--attribution-seconds); the verdict stands", seconds
        )
        return None
