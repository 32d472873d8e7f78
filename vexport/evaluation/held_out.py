"""Decide PASS, FAIL or INCONCLUSIVE from log-probabilities of held-out text, if there are no tasks.

The sample consists of rows, because tokens of one row depend on each other. PASS needs every
measure below its limit, with an upper bound at 1 - alpha (an intersection-union test, as for
tasks). The measures are the mean KL to the baseline, the rise of the NLL, and the fall of the
acceptance length if there are drafts. FAIL needs one measure above its limit, with a lower bound at
alpha divided by the number of measures (Bonferroni).
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from vexport.errors import CheckpointFailed, Inconclusive
from vexport.evaluation.drift import mean_kls
from vexport.evaluation.statistics import Interval, Scores, bca_interval, documents_to_settle
from vexport.evaluation.verdict import overall_outcome
from vexport.files import digest_bytes
from vexport.inference.answers import Served
from vexport.records import (
    AcceptanceLengths,
    DraftCounts,
    Outcome,
    TextLimit,
    TextMeasure,
    TextVerdict,
    Verdict,
)
from vexport.scenario import Evaluate

LEAST_ROWS = 8
"""Minimum number of rows that decide. An interval of fewer rows shows too little of other rows."""
METHOD = (
    "log-probabilities of held-out text in vLLM; bounds over rows, the wider of Student's "
    "and BCa bootstrap"
)
ACCEPTANCE_LIMIT = 0.05
"""Share of the acceptance length that may be lost.

At 5 %, a step yields 5 % fewer tokens. That costs as much decoding speed, and no accuracy.
"""
_DIGITS = 16


def decide_on_text(data: str, baseline: Served, candidate: Served, settings: Evaluate) -> Verdict:
    """Compare two models on the rows of `data`.

    If `settings` request drafts, the share of accepted drafts is compared, too.

    Raises:
        Inconclusive: If a model drafts nothing.
        CheckpointFailed: If the candidate's tokenizer gives other tokens, or if the candidate's
        log-probabilities are not finite.
    """
    for row, (first, other) in enumerate(zip(baseline.rows, candidate.rows, strict=False), 1):
        if first != other:
            raise _failed(
                candidate, f"other tokens in row {row} of the text", "the baseline's tokenizer"
            )
    text = _measured(data, baseline, candidate, settings)
    outcome, engine = overall_outcome(text.limits), candidate.result.engine
    return Verdict(
        outcome=outcome,
        reason=text_reason(outcome, text),
        margin=settings.nll_limit,
        alpha=settings.alpha,
        method=METHOD,
        tasks=(),
        device=engine.device if engine else "",
        text=text,
    )


def _measured(data: str, baseline: Served, candidate: Served, settings: Evaluate) -> TextVerdict:
    method, old_drafts, new_drafts = (
        settings.speculative,
        baseline.result.drafts,
        candidate.result.drafts,
    )
    kls = mean_kls(baseline, candidate)
    old, new = baseline.each_row("nll"), candidate.each_row("nll")
    rises = np.array([(after - before).mean() for before, after in zip(old, new, strict=True)])
    if kls is None or not np.isfinite(rises).all():
        raise _failed(candidate, "log-probabilities that are not finite", "numbers")
    is_partial = baseline.is_partial or candidate.is_partial
    measure: TextMeasure = (
        "lower bound of the KL to the baseline" if is_partial else "KL to the baseline"
    )
    measured: list[tuple[TextMeasure, Scores, float]] = [
        (measure, np.array(kls), settings.kl_limit),
        ("rise of the NLL", rises, settings.nll_limit),
    ]
    if method:
        fall = acceptance_fall(old_drafts, new_drafts)
        measured.append(("fall of the acceptance length", fall, ACCEPTANCE_LIMIT))
    pairs = zip(baseline.each_row("likeliest"), candidate.each_row("likeliest"), strict=True)
    agreement = np.array([(first == other).mean() for first, other in pairs])
    certain = mean_bounds(agreement, settings.alpha)
    return TextVerdict(
        data=data,
        digest=digest_bytes(repr(baseline.rows).encode())[:_DIGITS],
        rows=len(old),
        tokens=sum(map(len, old)),
        positions=sum(len(row) - 1 for row in baseline.prompts.tokens),
        baseline_nll=float(np.concatenate(old).mean()),
        candidate_nll=float(np.concatenate(new).mean()),
        top1_agreement=float(agreement.mean()),
        top1_low=max(0.0, certain.low) if certain else None,
        top1_high=min(1.0, certain.high) if certain else None,
        limits=tuple(
            judge_limit(name, values, limit, settings.alpha, len(measured))
            for name, values, limit in measured
        ),
        acceptance=_acceptance(method, old_drafts, new_drafts) if method else None,
    )


def acceptance_fall(baseline: Sequence[DraftCounts], candidate: Sequence[DraftCounts]) -> Scores:
    """Return each prompt's part in the lost share of the acceptance length, shape (prompts,).

    The share is 1 - candidate / baseline. The lengths are ratios of sums over prompts. To first
    order, the mean and spread of these parts are the value and spread of that ratio (Cochran,
    Sampling Techniques, 1977, chapter 6). Both models' parts of a prompt stay together.
    """
    (before, old), (after, new) = _lengths(baseline), _lengths(candidate)
    return 1 - after / before * (1 + (new - after) / after - (old - before) / before)


def _lengths(counts: Sequence[DraftCounts]) -> tuple[float, Scores]:
    """Return the acceptance length over all prompts, and each prompt's part in it.

    The mean of the parts is the acceptance length.
    """
    drafts = np.array([count.drafts for count in counts], dtype=float)
    accepted = np.array([count.accepted_tokens for count in counts], dtype=float)
    if not drafts.sum():
        got, need = (
            f"no draft in {len(counts)} prompts",
            "drafts, to tell how many tokens are accepted",
        )
        raise Inconclusive(
            "--speculative", got=got, need=need, fix="give other text, or more (--text-rows)"
        )
    ratio = float(accepted.sum() / drafts.sum())
    return 1 + ratio, 1 + ratio + (accepted - ratio * drafts) / drafts.mean()


def _acceptance(
    method: str, baseline: Sequence[DraftCounts], candidate: Sequence[DraftCounts]
) -> AcceptanceLengths:
    old, new = (
        sum(count.draft_tokens for count in counts) / sum(count.drafts for count in counts)
        for counts in (baseline, candidate)
    )
    before, after = _lengths(baseline)[0], _lengths(candidate)[0]
    return AcceptanceLengths(
        method=method, draft_tokens=(old, new), baseline=before, candidate=after
    )


def judge_limit(
    measure: TextMeasure, values: Scores, limit: float, alpha: float, measures: int = 2
) -> TextLimit:
    """Judge one measure against its limit. `values` has the shape (rows,).

    Fewer than LEAST_ROWS rows are INCONCLUSIVE.
    """
    mean = float(values.mean())
    below, above = mean_bounds(values, alpha / measures), mean_bounds(values, alpha)
    low, high = below.low if below else None, above.high if above else None
    outcome: Outcome = "INCONCLUSIVE"
    needed = None
    if low is None or high is None or len(values) < LEAST_ROWS:
        needed = LEAST_ROWS
    elif high < limit:
        outcome = "PASS"
    elif low > limit:
        outcome = "FAIL"
    else:
        spread = float(values.std(ddof=1)) / math.sqrt(len(values))
        statistic = (limit - mean) / spread if spread else 0.0
        needed = documents_to_settle(
            len(values), statistic, alpha if statistic > 0 else alpha / measures
        )
    return TextLimit(
        measure=measure,
        value=mean,
        low=low,
        high=high,
        limit=limit,
        outcome=outcome,
        rows_needed=needed,
    )


def mean_bounds(values: Scores, alpha: float) -> Interval | None:
    """Return one-sided bounds of a mean over rows, or None for a single row.

    `values` has the shape (rows,). The bounds are the wider of Student's and the BCa bootstrap's.
    Student's upper bound is too close for skewed values such as KLs. The bootstrap is too narrow
    for few rows.
    """
    if len(values) < 2:
        return None
    mean = float(values.mean())
    if np.ptp(values) == 0:
        return Interval(mean, mean)
    reach = float(stats.t.isf(alpha, len(values) - 1) * values.std(ddof=1)) / math.sqrt(len(values))
    low, high = bca_interval((values,), np.mean, alpha)
    return Interval(min(mean - reach, low), max(mean + reach, high))


def text_reason(outcome: Outcome, text: TextVerdict) -> str:
    """Return the reason of the outcome on the text, without a full stop."""
    if text.rows < LEAST_ROWS:
        return f"the text is too short: {text.rows} rows of it, at least {LEAST_ROWS} decide"
    decisive = [limit for limit in text.limits if limit.outcome == outcome]
    shown = (" and " if outcome == "PASS" else "; ").join(map(_shown, decisive))
    sentence = f"{shown} over {text.tokens:,} tokens of held-out text"
    if outcome != "INCONCLUSIVE":
        return sentence
    needed = [limit.rows_needed for limit in decisive if limit.rows_needed is not None]
    if len(needed) < len(decisive):
        return f"{sentence} is not settled; at this value no number of rows would settle it"
    return f"{sentence} is not settled; about {max(needed):,} rows would settle it"


def _shown(limit: TextLimit) -> str:
    assert limit.low is not None
    assert limit.high is not None
    numbers = (limit.value, limit.low, limit.high, limit.limit)
    value, low, high, most = (
        f"{number:.1%}" if limit.is_share else f"{number:.3g}" for number in numbers
    )
    unit = "" if limit.is_share else " nats a token"
    if limit.outcome == "PASS":
        return f"{limit.measure} {value} (at most {high}, limit {most}){unit}"
    bound = f"at least {low}" if limit.outcome == "FAIL" else f"between {low} and {high}"
    return f"{limit.measure} {value} ({bound}), limit {most}{unit}"


def _failed(candidate: Served, got: str, need: str) -> CheckpointFailed:
    where = f"candidate {candidate.checkpoint}"
    return CheckpointFailed(
        where, got=got, need=need, fix="look at `vexport check`, or export it again"
    )
