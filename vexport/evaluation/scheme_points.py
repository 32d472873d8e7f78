"""A comparison of schemes: what each of several runs stores, and what that loses."""

from collections.abc import Sequence

from vexport.types import Comparison, Report, SchemePoint, TaskVerdict, Verdict


def scheme_points(reports: Sequence[Report]) -> tuple[SchemePoint, ...]:
    """A point for each run, from the largest checkpoint to the smallest."""
    points = [_point(number, report) for number, report in enumerate(reports, 1)]
    return tuple(sorted(points, key=lambda point: (-point.bits_per_weight, point.name)))


def _point(number: int, report: Report) -> SchemePoint:
    plan, drift = report.plan, report.drift
    loss = _loss(report.verdict) if report.verdict and report.verdict.tasks else None
    return SchemePoint(
        digest=drift.digest if drift else "",
        number=number,
        name=report.name,
        source=report.source,
        schemes=plan.schemes,
        stored_bytes=plan.output_bytes,
        bits_per_weight=8 * plan.output_bytes / max(1, plan.parameters),
        mean_kl=drift.mean_kl if drift else None,
        nll_rise=drift.candidate_nll - drift.baseline_nll if drift else None,
        difference=loss.difference if loss else None,
        low=loss.low if loss else None,
        high=loss.high if loss else None,
        outcome=report.outcome,
    )


def _loss(verdict: Verdict) -> Comparison | TaskVerdict:
    """All documents as one task, else the task that is nearest to a loss beyond the margin."""
    return verdict.pooled or min(verdict.tasks, key=lambda task: task.low)
