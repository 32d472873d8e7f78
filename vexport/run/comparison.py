"""Build the rows of a comparison, and its outcome: of several runs, or of a checkpoint's variants.

Among runs, the run with the smallest checkpoint that passes is marked.
"""

from collections.abc import Sequence
from dataclasses import replace

from vexport.records import ComparedRun, ComparedVariant, Drift, Outcome, TaskVerdict, Verdict
from vexport.records.values import join_limited
from vexport.reports.formatting import outcome_line
from vexport.reports.run_record import Report

# Maximum number of variants that a reason names. The others are counted.
MAX_NAMED = 3


def compared_run(report: Report, folder: str) -> ComparedRun:
    """Return the row of a finished run."""
    checkpoint = report.checkpoint
    num_bytes = checkpoint.num_bytes or 0
    bits = 8 * num_bytes / checkpoint.parameters if checkpoint.parameters else 0.0
    return ComparedRun(
        name=report.name,
        folder=folder,
        schemes=checkpoint.scheme_names or checkpoint.format,
        outcome=report.outcome,
        reason=report.reason,
        num_bytes=num_bytes,
        bits_per_weight=bits,
        mean_kl=reported_kl(report.verdict, report.drift),
        worst=worst_task(report.verdict) if report.verdict else None,
    )


def outcome_and_reason(verdict: Verdict) -> str:
    """Return the outcome and its reason in a single line."""
    return f"accuracy: {outcome_line(verdict.outcome, verdict.device)}: {verdict.reason}"


def reported_kl(verdict: Verdict | None, drift: Drift | None) -> float | None:
    """Return the KL in the worst bucket of held-out text, or without text the prompts' mean KL."""
    text = verdict.text if verdict is not None else None
    if text is not None and text.buckets:
        return text.limits[0].value
    return drift.mean_kl if drift else None


def worst_task(verdict: Verdict) -> TaskVerdict | None:
    """Return the task with the lowest lower bound of the change, without its documents."""
    worst = verdict.worst_task
    return replace(worst.without_flips, also=()) if worst else None


def mark_smallest(runs: Sequence[ComparedRun]) -> tuple[ComparedRun, ...]:
    """Mark the run with the smallest checkpoint that passes.

    Of checkpoints with equal size, the checkpoint with the lowest mean KL is marked. If several
    pass and a size is unknown, as for servers and given results, no run is marked.
    """
    passed = [run for run in runs if run.outcome == "PASS"]
    if len(passed) > 1 and not all(run.num_bytes for run in passed):
        passed = []
    best = min(passed, key=lambda run: (run.num_bytes, run.mean_kl or 0.0), default=None)
    return tuple(replace(run, smallest=run is best) for run in runs)


def outcome_of(runs: Sequence[ComparedRun]) -> Outcome:
    """Return PASS if a run passes, FAIL if all runs fail, otherwise INCONCLUSIVE."""
    outcomes = {run.outcome for run in runs}
    if "PASS" in outcomes:
        return "PASS"
    return "FAIL" if outcomes == {"FAIL"} else "INCONCLUSIVE"


def outcome_of_variants(rows: Sequence[ComparedVariant]) -> Outcome:
    """Return FAIL if a variant fails or is refused, and PASS if all variants pass.

    Otherwise return INCONCLUSIVE. The baseline is not counted.
    """
    outcomes = {row.outcome for row in rows} - {"BASELINE"}
    if outcomes & {"FAIL", "REFUSED"}:
        return "FAIL"
    return "PASS" if outcomes == {"PASS"} else "INCONCLUSIVE"


def reason_of_variants(rows: Sequence[ComparedVariant]) -> str:
    """Return the reason for the common outcome of all variants, without a full stop.

    Only the variants with the gravest outcomes are explained. If vLLM refuses the first variant,
    the reason is vLLM's message. Other refused variants are listed without vLLM's messages.
    """
    first, *others = rows
    if first.outcome == "REFUSED":
        why = f"the baseline of all others, {first.name}: {first.reason}"
        return f"vLLM refuses the first variant, {why}"
    if all(row.outcome == "PASS" for row in others):
        passed = {1: "the variant passes", 2: "both variants pass"}
        count = len(others)
        return (
            f"{passed.get(count, f'all {count} variants pass')}: {_variants_with_reasons(others)}"
        )
    by_outcome = {
        outcome: [row for row in others if row.outcome == outcome]
        for outcome in ("FAIL", "REFUSED", "NO ANSWER", "INCONCLUSIVE")
    }
    decisive = [_variants_with_reasons(by_outcome["FAIL"])]
    if refused := by_outcome["REFUSED"]:
        names = join_limited([row.name for row in refused], ", ", MAX_NAMED)
        decisive.append(f"vLLM refuses {names}")
    decisive = [text for text in decisive if text]
    return "; ".join(decisive) or _variants_with_reasons(
        by_outcome["NO ANSWER"] or by_outcome["INCONCLUSIVE"]
    )


def _variants_with_reasons(rows: Sequence[ComparedVariant]) -> str:
    return join_limited([f"{row.name}: {row.reason}" for row in rows], "; ", MAX_NAMED)
