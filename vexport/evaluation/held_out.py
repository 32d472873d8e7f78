"""PASS, FAIL or INCONCLUSIVE from the log-probabilities of held-out text, where there are no tasks.

Rows are the sample: tokens of one row depend on each other. PASS needs the mean KL to the baseline and the
rise of the NLL below their limits, each with an upper bound at 1 - alpha (an intersection-union test, as for
tasks); FAIL one of them above, with a lower bound at 1 - alpha / 2 (Bonferroni).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from scipy import stats

from vexport.errors import CheckpointFailed, Inconclusive
from vexport.evaluation.drift import Limits, Scored, mean_kls
from vexport.evaluation.statistics import Interval, Scores, bca_interval, documents_to_settle
from vexport.files import digest_bytes
from vexport.records import (
    AcceptanceLengths,
    DraftCounts,
    Outcome,
    TextLimit,
    TextMeasure,
    TextVerdict,
    Verdict,
)

LEAST_ROWS = 8
"""Of fewer, an interval of the mean says little of rows that were not seen."""
METHOD = (
    "log-probabilities of held-out text in vLLM; bounds over rows, the wider of Student's and BCa bootstrap"
)
ACCEPTANCE_LIMIT = 0.05
"""Most of the acceptance length that may be lost: a step then yields 5 % fewer tokens, which costs as much
speed of decoding and no accuracy."""
_DIGITS = 16

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadText:
    """A model that read the text: its log-probabilities of the rows' first tokens, and `file`, what each
    token cost (vexport.engine.generate.write_text_scores).
    """

    scored: Scored
    rows: Rows
    file: Path
    drafts: tuple[DraftCounts, ...] = ()


def decide_on_text(
    data: str,
    baseline: ReadText,
    candidate: ReadText,
    limits: Limits,
    *,
    device: str = "",
    speculative: str = "",
) -> Verdict:
    """Compare two models on the rows of `data`, and how they accept drafts of the method `speculative`.

    Inconclusive where one drafts nothing. CheckpointFailed where the candidate reads the text as other
    tokens, or its numbers are not finite.
    """
    _require_equal_tokens(baseline, candidate)
    kls = mean_kls(baseline.scored, candidate.scored)
    old, new = load_file(baseline.file), load_file(candidate.file)
    numbers = range(len(baseline.rows))
    costs = [(old[f"nll.{n}"].double().numpy(), new[f"nll.{n}"].double().numpy()) for n in numbers]
    same = [(old[f"likeliest.{n}"] == new[f"likeliest.{n}"]).double().mean().item() for n in numbers]
    rises = np.array([float((after - before).mean()) for before, after in costs])
    if kls is None or not np.isfinite(rises).all():
        raise _failed(candidate, "log-probabilities that are not finite", "numbers")
    is_partial = baseline.scored.is_partial or candidate.scored.is_partial
    measure: TextMeasure = "lower bound of the KL to the baseline" if is_partial else "KL to the baseline"
    measured: list[tuple[TextMeasure, Scores, float]] = [
        (measure, np.array(kls), limits.kl),
        ("rise of the NLL", rises, limits.nll),
    ]
    if speculative:
        fall = acceptance_fall(baseline.drafts, candidate.drafts)
        measured.append(("fall of the acceptance length", fall, ACCEPTANCE_LIMIT))
    agreement = np.array(same)
    certain = mean_bounds(agreement, limits.alpha)
    text = TextVerdict(
        data=data,
        digest=digest_bytes(repr(baseline.rows).encode())[:_DIGITS],
        rows=len(costs),
        tokens=sum(len(before) for before, _ in costs),
        positions=sum(len(row) - 1 for row in baseline.scored.prompts.tokens),
        baseline_nll=float(np.concatenate([before for before, _ in costs]).mean()),
        candidate_nll=float(np.concatenate([after for _, after in costs]).mean()),
        top1_agreement=float(agreement.mean()),
        top1_low=max(0.0, certain.low) if certain else None,
        top1_high=min(1.0, certain.high) if certain else None,
        limits=tuple(
            judge_limit(name, values, limit, limits.alpha, len(measured)) for name, values, limit in measured
        ),
        acceptance=_acceptance(speculative, baseline.drafts, candidate.drafts) if speculative else None,
    )
    outcome = _outcome([limit.outcome for limit in text.limits])
    return Verdict(
        outcome=outcome,
        reason=text_reason(outcome, text),
        margin=limits.nll,
        alpha=limits.alpha,
        method=METHOD,
        tasks=(),
        device=device,
        text=text,
    )


def acceptance_fall(baseline: Sequence[DraftCounts], candidate: Sequence[DraftCounts]) -> Scores:
    """Each prompt's part, shape (prompts,), in the share of the acceptance length that is lost: 1 -
    candidate / baseline.

    The lengths are ratios of sums over prompts, whose value and spread these parts have to first order
    (Cochran, Sampling Techniques, 1977, chapter 6); both models' parts of a prompt stay together.
    """
    (before, old), (after, new) = _lengths(baseline), _lengths(candidate)
    return 1 - after / before * (1 + (new - after) / after - (old - before) / before)


def _lengths(counts: Sequence[DraftCounts]) -> tuple[float, Scores]:
    """The acceptance length over all prompts, and each prompt's part in it, which have that mean."""
    drafts = np.array([count.drafts for count in counts], dtype=float)
    accepted = np.array([count.accepted_tokens for count in counts], dtype=float)
    if not drafts.sum():
        got, need = f"no draft in {len(counts)} prompts", "drafts, to tell how many tokens are accepted"
        raise Inconclusive("--speculative", got=got, need=need, fix="give other text, or more (--text-rows)")
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
    return AcceptanceLengths(method=method, draft_tokens=(old, new), baseline=before, candidate=after)


def judge_limit(
    measure: TextMeasure, values: Scores, limit: float, alpha: float, measures: int = 2
) -> TextLimit:
    """One of the measures, shape (rows,), against its limit; fewer than LEAST_ROWS rows settle nothing."""
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
        needed = documents_to_settle(len(values), statistic, alpha if statistic > 0 else alpha / measures)
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
    """One-sided bounds of a mean over rows, shape (rows,): the wider of Student's and the BCa bootstrap's.

    Student's is too narrow above a mean of skewed values, as KLs are, the bootstrap for few of them. Of one
    row there are none.
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
    over = f"over {text.tokens:,} tokens of held-out text"
    if text.rows < LEAST_ROWS:
        return f"the text is too short: {text.rows} rows of it, at least {LEAST_ROWS} decide"
    if outcome == "PASS":
        shown = (
            f"{limit.measure} {_shown(limit, limit.value)} (at most {_shown(limit, limit.high)}, "
            f"limit {_shown(limit, limit.limit)}){_unit(limit)}"
            for limit in text.limits
        )
        return f"{' and '.join(shown)} {over}"
    worst = [limit for limit in text.limits if limit.outcome == outcome]
    shown = (
        f"{limit.measure} {_shown(limit, limit.value)} ({_bound(limit)}), limit "
        f"{_shown(limit, limit.limit)}{_unit(limit)}"
        for limit in worst
    )
    sentence = f"{'; '.join(shown)} {over}"
    return sentence if outcome == "FAIL" else f"{sentence} is not settled; {_remedy(worst)}"


def _bound(limit: TextLimit) -> str:
    low, high = _shown(limit, limit.low), _shown(limit, limit.high)
    return f"at least {low}" if limit.outcome == "FAIL" else f"between {low} and {high}"


def _shown(limit: TextLimit, value: float | None) -> str:
    assert value is not None
    return f"{value:.1%}" if limit.is_share else f"{value:.3g}"


def _unit(limit: TextLimit) -> str:
    return "" if limit.is_share else " nats a token"


def _remedy(limits: Sequence[TextLimit]) -> str:
    needed = [limit.rows_needed for limit in limits if limit.rows_needed is not None]
    if len(needed) < len(limits):
        return "at this value no number of rows would settle it"
    return f"about {max(needed):,} rows would settle it"


def _outcome(outcomes: Sequence[Outcome]) -> Outcome:
    if "FAIL" in outcomes:
        return "FAIL"
    return "INCONCLUSIVE" if "INCONCLUSIVE" in outcomes else "PASS"


def _require_equal_tokens(baseline: ReadText, candidate: ReadText) -> None:
    for row, (old, new) in enumerate(zip(baseline.rows, candidate.rows, strict=False), 1):
        if old != new:
            raise _failed(candidate, f"other tokens in row {row} of the text", "the baseline's tokenizer")


def _failed(candidate: ReadText, got: str, need: str) -> CheckpointFailed:
    where = f"candidate {candidate.scored.checkpoint}"
    return CheckpointFailed(where, got=got, need=need, fix="look at `vexport check`, or export it again")
