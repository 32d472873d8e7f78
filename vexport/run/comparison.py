"""Compare several runs: a row for each run, the smallest run that passes, and the outcome
of all runs.
"""

from collections.abc import Sequence
from dataclasses import replace

from vexport.records import ComparedRun, Outcome, TaskVerdict, Verdict
from vexport.reports.formatting import schemes_of, sizes_of
from vexport.reports.report import Report


def compared_run(report: Report, folder: str) -> ComparedRun:
    """Return the row of a finished run."""
    sizes = sizes_of(report)
    num_bytes = sizes.output_bytes or 0
    bits = 8 * num_bytes / sizes.parameters if sizes.parameters else 0.0
    return ComparedRun(
        name=report.name,
        folder=folder,
        schemes=schemes_of(report),
        outcome=report.outcome,
        reason=report.reason,
        num_bytes=num_bytes,
        bits_per_weight=bits,
        mean_kl=report.drift.mean_kl if report.drift else None,
        worst=worst_task(report.verdict) if report.verdict else None,
    )


def worst_task(verdict: Verdict) -> TaskVerdict | None:
    """Return the task with the lowest bound, without its documents."""
    worst = verdict.worst_task
    return replace(worst, flips=(), also=()) if worst else None


def mark_smallest(runs: Sequence[ComparedRun]) -> tuple[ComparedRun, ...]:
    """Mark the smallest run that passes.

    Of runs with equal size, mark the run nearest to the baseline.
    """
    passed = [run for run in runs if run.outcome == "PASS"]
    best = min(passed, key=lambda run: (run.num_bytes, run.mean_kl or 0.0), default=None)
    return tuple(replace(run, smallest=run is best) for run in runs)


def outcome_of(runs: Sequence[ComparedRun]) -> Outcome:
    """Return PASS if a run passes, FAIL if all runs fail, otherwise INCONCLUSIVE."""
    outcomes = {run.outcome for run in runs}
    if "PASS" in outcomes:
        return "PASS"
    return "FAIL" if outcomes == {"FAIL"} else "INCONCLUSIVE"
