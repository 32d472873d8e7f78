"""Decide PASS, FAIL or INCONCLUSIVE from log-probabilities of held-out text, if there are no tasks.

The statistics count rows, because tokens of one row depend on each other. In each bucket of
positions, two measures are tested: the mean KL to the baseline, and the rise of the NLL. If there
are drafts, the fall of the acceptance length is also tested.

The verdict is PASS if every measure's upper bound at 1 - alpha is below its limit in every bucket
(an intersection-union test, as for tasks). The verdict is FAIL if any measure's lower bound is
above its limit in any bucket. The level of the lower bounds is alpha divided by the number of tests
(Bonferroni). The baseline reads some rows twice, which shows the noise of the engine.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import stats

from vexport.errors import CheckpointFailed, EnvironmentFault, Inconclusive
from vexport.files import digest_bytes
from vexport.inference.answers import ServedSession
from vexport.judge.positions import (
    ComparedRow,
    Span,
    buckets_of,
    compare_repeated,
    compare_rows,
    doublings_of,
    joined,
    row_means,
)
from vexport.judge.statistics import Interval, bca_interval, documents_to_settle
from vexport.judge.verdict import overall_outcome
from vexport.records import (
    AcceptanceLengths,
    DraftCounts,
    Outcome,
    Reason,
    TextBucket,
    TextLimit,
    TextMeasure,
    TextNoise,
    TextPoint,
    TextVerdict,
    Verdict,
)
from vexport.rules import environment, verdict
from vexport.scenario import Evaluate
from vexport.scores.aggregates import Scores

MIN_ROWS = 8
"""Minimum number of rows for PASS or FAIL. Fewer rows do not represent other text."""
METHOD = (
    "log-probabilities of held-out text in vLLM; bounds over rows, the wider of Student's "
    "and BCa bootstrap"
)
ACCEPTANCE_LIMIT = 0.05
"""Share of the acceptance length that may be lost.

At 5 %, a decoding step yields 5 % fewer tokens. Decoding becomes 5 % slower, and accuracy is
unchanged.
"""
NOISE_SHARE = 0.25
"""Maximum noise of the engine, as a share of the KL's limit.

The noise limit for tasks (`MAX_CHANGED_SHARE` in repeated.py) is the same share of the default
margin: 0.5 points for a margin of 2 points.
"""
_DIGITS = 16


def decide_on_text(
    data: str, baseline: ServedSession, candidate: ServedSession, settings: Evaluate
) -> Verdict:
    """Compare two models on the rows of `data`.

    If `settings` request drafts, the acceptance lengths are compared, too.

    Raises:
        Inconclusive: If a model produces no draft tokens.
        CheckpointFailed: If the candidate's tokenizer splits the text into different tokens than
        the baseline's, or if log-probabilities are not finite.
        EnvironmentFault: If a model's log-probabilities change too much when the model reads rows
        again.
    """
    for row, (first, other) in enumerate(zip(baseline.rows, candidate.rows, strict=False), 1):
        if first != other:
            raise CheckpointFailed.of(verdict.TEXT_TOKENS, _where(candidate), row=row)
    text = _measure_text(data, baseline, candidate, settings)
    _require_steady("baseline", baseline, text, settings.kl_limit)
    _require_steady("candidate", candidate, text, settings.kl_limit)
    outcome, engine = overall_outcome(text.limits), candidate.result.engine
    reason, late = text_reason(outcome, text), verdict.LATE_LOSS
    return Verdict(
        outcome=outcome,
        rule=reason.rule,
        reason=reason.text,
        margin=settings.nll_limit,
        alpha=settings.alpha,
        method=METHOD,
        tasks=(),
        warnings=(f"{late.got}: {late.do}",) if text.fails_late else (),
        device=engine.device if engine else "",
        text=text,
    )


def _measure_text(
    data: str, baseline: ServedSession, candidate: ServedSession, settings: Evaluate
) -> TextVerdict:
    rows = list(compare_rows(baseline, candidate))
    if not all(np.isfinite([*row.kl, *row.candidate_nll, *row.baseline_nll]).all() for row in rows):
        raise CheckpointFailed.of(verdict.TEXT_NUMBERS, _where(candidate))
    buckets, acceptance = _judge_buckets(rows, baseline, candidate, settings)
    method = settings.speculative
    drafts = (baseline.result.drafts, candidate.result.drafts)
    old = np.concatenate([row.baseline_nll for row in rows])
    new = np.concatenate([row.candidate_nll for row in rows])
    agreement = np.array([1 - row.changed.mean() for row in rows])
    interval = mean_bounds(agreement, settings.alpha)
    worst = [
        _worst_limit(
            [limit for bucket in buckets for limit in bucket.limits if limit.is_rise == is_rise]
        )
        for is_rise in (False, True)
    ]
    return TextVerdict(
        data=data,
        digest=digest_bytes(repr(baseline.rows).encode())[:_DIGITS],
        rows=len(rows),
        tokens=len(old),
        baseline_nll=float(old.mean()),
        candidate_nll=float(new.mean()),
        top1_agreement=float(agreement.mean()),
        top1_low=max(0.0, interval.low) if interval else None,
        top1_high=min(1.0, interval.high) if interval else None,
        limits=(*worst, *acceptance),
        acceptance=_acceptance(method, *drafts) if method else None,
        buckets=buckets,
        curve=tuple(_curve(rows, list(compare_repeated(baseline)))),
    )


def _judge_buckets(
    rows: Sequence[ComparedRow],
    baseline: ServedSession,
    candidate: ServedSession,
    settings: Evaluate,
) -> tuple[tuple[TextBucket, ...], tuple[TextLimit, ...]]:
    """Judge each bucket, and the acceptance length if the settings request drafts.

    Without drafts, the second tuple is empty.
    """
    spans = buckets_of(max(row.tokens for row in rows))
    measured = {span: list(_bucket_values(rows, span, settings)) for span in spans}
    falls: list[Scores] = []
    if settings.speculative:
        falls.append(acceptance_loss(baseline.result.drafts, candidate.result.drafts))
    tests = sum(map(len, measured.values())) + len(falls)
    again = list(compare_repeated(baseline))
    buckets = []
    for span, measures in measured.items():
        limits = tuple(
            judge_limit(name, values, limit, settings.alpha, tests, bucket=span)
            for name, values, limit in measures
        )
        buckets.append(_bucket(rows, again, span, limits, settings.alpha))
    acceptance = tuple(
        judge_limit("fall of the acceptance length", fall, ACCEPTANCE_LIMIT, settings.alpha, tests)
        for fall in falls
    )
    return tuple(buckets), acceptance


def _bucket_values(
    rows: Sequence[ComparedRow], span: Span, settings: Evaluate
) -> Iterator[tuple[TextMeasure, Scores, float]]:
    """Yield (measure, means, limit) for each measure of a bucket.

    The array of means has a value for each row.
    """
    is_exact = all(row.exact >= min(span.places.stop, len(row.kl)) for row in rows)
    measure: TextMeasure = (
        "KL to the baseline" if is_exact else "lower bound of the KL to the baseline"
    )
    yield measure, row_means([row.kl for row in rows], span), settings.kl_limit
    rises = row_means([row.candidate_nll - row.baseline_nll for row in rows], span)
    yield "rise of the NLL", rises, settings.nll_limit


def _bucket(
    rows: Sequence[ComparedRow],
    again: Sequence[ComparedRow],
    span: Span,
    limits: tuple[TextLimit, ...],
    alpha: float,
) -> TextBucket:
    changed = row_means([row.changed for row in rows], span)
    interval = mean_bounds(changed, alpha)
    old = joined([row.baseline_nll for row in rows], span)
    return TextBucket(
        start=span.start,
        end=span.end,
        tokens=len(old),
        baseline_nll=float(old.mean()),
        candidate_nll=float(joined([row.candidate_nll for row in rows], span).mean()),
        changed=float(changed.mean()),
        changed_low=max(0.0, interval.low) if interval else None,
        changed_high=min(1.0, interval.high) if interval else None,
        limits=limits,
        noise=_noise(again, span),
    )


def _noise(again: Sequence[ComparedRow], span: Span) -> TextNoise | None:
    """Return the difference between the baseline's two readings, None without a second reading."""
    kls = joined([row.kl for row in again], span)
    if not len(kls):
        return None
    rises = joined([row.candidate_nll - row.baseline_nll for row in again], span)
    return TextNoise(
        rows=len(again),
        kl=float(kls.mean()),
        nll_rise=float(rises.mean()),
        changed=float(joined([row.changed for row in again], span).mean()),
    )


def _curve(rows: Sequence[ComparedRow], again: Sequence[ComparedRow]) -> Iterator[TextPoint]:
    """Yield the means over all rows, for each span between powers of two."""
    for span in doublings_of(max(row.tokens for row in rows)):
        kls = joined([row.kl for row in rows], span)
        noise = joined([row.kl for row in again], span)
        yield TextPoint(
            start=span.start,
            end=span.end,
            baseline_nll=float(joined([row.baseline_nll for row in rows], span).mean()),
            candidate_nll=float(joined([row.candidate_nll for row in rows], span).mean()),
            kl=float(kls.mean()),
            noise=float(noise.mean()) if len(noise) else None,
        )


def _worst_limit(limits: Sequence[TextLimit]) -> TextLimit:
    """Return the limit with the worst outcome, and among equal outcomes with the highest value."""
    order: tuple[Outcome, ...] = ("PASS", "INCONCLUSIVE", "FAIL")
    return max(limits, key=lambda limit: (order.index(limit.outcome), limit.value))


def _require_steady(role: str, side: ServedSession, text: TextVerdict, kl_limit: float) -> None:
    """Raise EnvironmentFault if a model's second reading differs too much from its first.

    Nothing is raised if the model read no row twice.
    """
    again = [row.kl for row in compare_repeated(side)]
    if not again:
        return
    noises = {
        bucket.label: float(joined(again, Span(bucket.start, bucket.end)).mean())
        for bucket in text.buckets
    }
    worst = max(noises, key=noises.__getitem__)
    most = NOISE_SHARE * kl_limit
    if noises[worst] <= most:
        return
    kl = noises[worst]
    raise EnvironmentFault.of(
        environment.NOISE,
        f"{role} {side.checkpoint}",
        found=f"log-probabilities of the {worst} changed by a KL of {kl:.3g} nats per token",
        most=f"{most:g}, a quarter of the limit",
    )


def acceptance_loss(baseline: Sequence[DraftCounts], candidate: Sequence[DraftCounts]) -> Scores:
    """Return each prompt's contribution to the fall of the acceptance length, shape (prompts,).

    The fall is 1 - candidate / baseline. Both acceptance lengths are ratios of sums over prompts.
    The mean of the contributions is the fall. To first order, their spread gives the standard error
    of the fall (Cochran, Sampling Techniques, 1977, chapter 6). A prompt's contribution combines
    both models, so the comparison is paired.
    """
    (before, old), (after, new) = _lengths(baseline), _lengths(candidate)
    return 1 - after / before * (1 + (new - after) / after - (old - before) / before)


def _lengths(counts: Sequence[DraftCounts]) -> tuple[float, Scores]:
    """Return the acceptance length over all prompts, and each prompt's contribution to it.

    The mean of the contributions is the acceptance length.
    """
    drafts = np.array([count.drafts for count in counts], dtype=float)
    accepted = np.array([count.accepted_tokens for count in counts], dtype=float)
    if not drafts.sum():
        raise Inconclusive.of(verdict.NO_DRAFTS, "--speculative", prompts=len(counts))
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
    measure: TextMeasure,
    values: Scores,
    limit: float,
    alpha: float,
    tests: int = 2,
    bucket: tuple[int, int] | None = None,
) -> TextLimit:
    """Judge a measure against its limit. `values` has the shape (rows,).

    The level of the lower bound is `alpha` divided by the number of all `tests`. With fewer than
    MIN_ROWS rows, the outcome is INCONCLUSIVE.
    """
    mean = float(values.mean())
    below, above = mean_bounds(values, alpha / tests), mean_bounds(values, alpha)
    low, high = below.low if below else None, above.high if above else None
    outcome: Outcome = "INCONCLUSIVE"
    needed = None
    if low is None or high is None or len(values) < MIN_ROWS:
        needed = MIN_ROWS
    elif high < limit:
        outcome = "PASS"
    elif low > limit:
        outcome = "FAIL"
    else:
        spread = float(values.std(ddof=1)) / math.sqrt(len(values))
        statistic = (limit - mean) / spread if spread else 0.0
        needed = documents_to_settle(
            len(values), statistic, alpha if statistic > 0 else alpha / tests
        )
    return TextLimit(
        measure=measure,
        value=mean,
        low=low,
        high=high,
        limit=limit,
        outcome=outcome,
        rows_needed=needed,
        bucket=bucket,
    )


def mean_bounds(values: Scores, alpha: float) -> Interval | None:
    """Return one-sided bounds of a mean over rows, or None for a single row.

    `values` has the shape (rows,). Each bound is the wider of two: Student's bound and the bound of
    the BCa bootstrap. Student's upper bound is too low for skewed values such as KLs. The
    bootstrap's bounds are too narrow for few rows.
    """
    if len(values) < 2:
        return None
    mean = float(values.mean())
    if np.ptp(values) == 0:
        return Interval(mean, mean)
    reach = float(stats.t.isf(alpha, len(values) - 1) * values.std(ddof=1)) / math.sqrt(len(values))
    low, high = bca_interval(values, alpha)
    return Interval(min(mean - reach, low), max(mean + reach, high))


def text_reason(outcome: Outcome, text: TextVerdict) -> Reason:
    """Return the reason for the outcome on the text."""
    if text.rows < MIN_ROWS:
        return Reason.of(verdict.FEW_ROWS, rows=text.rows, least=MIN_ROWS)
    decisive = [limit for limit in text.limits if limit.outcome == outcome]
    measures = (" and " if outcome == "PASS" else "; ").join(
        _limit_text(limit, text) for limit in decisive
    )
    place = f", in {text.rows:,} rows of held-out text"
    if len(text.buckets) < 2:
        place = f" over {text.tokens:,} tokens of held-out text"
    elif outcome == "PASS":
        buckets = f"each in the worst of {len(text.buckets)} buckets of positions"
        place = f", {buckets}, over {text.tokens:,} tokens of held-out text"
    if outcome == "PASS":
        return Reason.of(verdict.TEXT_WITHIN_LIMITS, measures=measures, place=place)
    if outcome == "FAIL":
        others = _other_buckets(text)
        return Reason.of(verdict.TEXT_LOSS, measures=measures, place=place, others=others)
    needed = [limit.rows_needed for limit in decisive if limit.rows_needed is not None]
    remedy = "at this value more rows would not settle it"
    if len(needed) == len(decisive):
        remedy = f"about {max(needed):,} rows would settle it"
    return Reason.of(verdict.TEXT_NOT_SETTLED, measures=measures, place=place, remedy=remedy)


def _other_buckets(text: TextVerdict) -> str:
    labels = [bucket.label for bucket in text.buckets if bucket.outcome == "PASS"]
    if labels:
        return f"; {' and '.join(labels)} pass"
    all_fail = all(bucket.outcome == "FAIL" for bucket in text.buckets)
    return f"; all {len(text.buckets)} buckets fail" if all_fail and len(text.buckets) > 1 else ""


def _limit_text(limit: TextLimit, text: TextVerdict) -> str:
    assert limit.low is not None
    assert limit.high is not None
    numbers = (limit.value, limit.low, limit.high, limit.limit)
    value, low, high, most = (
        f"{number:.1%}" if limit.is_share else f"{number:.3g}" for number in numbers
    )
    unit = "" if limit.is_share else " nats per token"
    if limit.outcome == "PASS":
        return f"{limit.measure} {value} (at most {high}, limit {most}){unit}"
    bound = f"at least {low}" if limit.outcome == "FAIL" else f"between {low} and {high}"
    place = f" in {limit.label}" if limit.label and len(text.buckets) > 1 else ""
    return f"{limit.measure} {value} ({bound}), limit {most}{unit}{place}"


def _where(candidate: ServedSession) -> str:
    return f"candidate {candidate.checkpoint}"
