"""The rungs of several runs."""

from dataclasses import replace

from tests.reports.sample import report, unloaded, verdict
from vexport.evaluation.scheme_points import scheme_points
from vexport.types import Drift


def drift(mean_kl: float) -> Drift:
    return Drift(
        prompts=1,
        positions=1,
        mean_kl=mean_kl,
        max_kl=mean_kl,
        top1_agreement=1.0,
        baseline_nll=1.0,
        candidate_nll=1.25,
        kl_limit=0.1,
        nll_limit=0.05,
        worst=(),
    )


def test_rungs_stand_from_large_to_small_with_what_each_loses() -> None:
    whole = replace(report(), name="large", drift=drift(0.01), verdict=replace(verdict(), pooled=None))
    half = replace(whole.plan, output_bytes=whole.plan.output_bytes // 2)
    small = replace(unloaded(), name="small", plan=half, drift=None, verdict=None, outcome="FAIL")
    first, second = scheme_points([small, whole])
    assert (first.name, second.name) == ("large", "small")
    assert first.bits_per_weight == 8 * whole.plan.output_bytes / whole.plan.parameters
    assert (first.mean_kl, first.nll_rise) == (0.01, 0.25)
    assert first.low == min(task.low for task in verdict().tasks)
    assert (second.mean_kl, second.nll_rise, second.difference, second.outcome) == (None, None, None, "FAIL")
