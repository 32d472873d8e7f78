"""PASS, FAIL or INCONCLUSIVE from the log-probabilities of held-out text, where there are no tasks.

Rows are the sample: tokens of one row depend on each other. PASS needs the mean KL to the baseline
and the rise of the NLL below their limits, each with an upper bound at 1 - alpha (an
intersection-union test, as for tasks); FAIL one of them above, with a lower bound at 1 - alpha / 2
(Bonferroni).
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
"""Of fewer, an interval of the mean says little of rows that were not seen."""
METHOD = (
    "log-probabilities of held-out text in vLLM; bounds over rows, the wider of Student's "
    "and BCa bootstrap"
)
ACCEPTANCE_LIMIT = 0.05
"""Most of the acceptance length that may be lost: a step then yields 5 % fewer tokens, which costs
as much speed of decoding and no accuracy."""
_DIGITS = 16


def decide_on_text(data: str, baseline: Served, candidate: Served, settings: Evaluate) -> Verdict:
    """Compare two models on the rows of `data`, and how they accept the drafts of `settings`.

    Inconclusive where one drafts nothing. CheckpointFailed where the candidate reads the text as
    other tokens, or its numbers are not finite.
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
    """Each prompt's part, shape (prompts,), in the share of the acceptance length that is lost: 1 -
    candidate / baseline.

    The lengths are ratios of sums over prompts, whose value and spread these parts have to first
    order (Cochran, Sampling Techniques, 1977, chapter 6); both models' parts of a prompt stay
    together.
    """
    (before, old), (after, new) = _lengths(baseline), _lengths(candidate)
    return 1 - after / before * (1 + (new - after) / after - (old - before) / before)


def _lengths(counts: Sequence[DraftCounts]) -> tuple[float, Scores]:
    """The acceptance length over all prompts, and each prompt's part in it, which have that
    mean.
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
    """One of the measures, shape (rows,), against its limit; fewer than LEAST_ROWS rows settle
    nothing.
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
    """One-sided bounds of a mean over rows, shape (rows,): the wider of Student's and the BCa
    bootstrap's.

    Student's is too narrow above a mean of skewed values, as KLs are, the bootstrap for few of
    them. Of one row there are none.
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
    """The reason of the outcome on the text, without a full stop."""
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
