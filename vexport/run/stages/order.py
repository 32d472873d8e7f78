"""List the stages of a run up to the verdict, in their order."""

from vexport.run.directory import Stage
from vexport.run.stages import making, serving

# Stages before the first engine starts.
PREPARATION_STAGES: tuple[Stage[object], ...] = (
    making.plan_candidates,
    serving.resolve_prompting,
    making.calibrate,
    making.measure_sensitivity,
    making.choose_auto_schemes,
    making.make_plan,
    making.quantize,
    making.check,
    serving.dry_load,
)
# Stages after both models have run.
COMPARISON_STAGES: tuple[Stage[object], ...] = (
    serving.load_baseline,
    serving.load_candidate,
    serving.measure_drift,
    serving.judge,
)
STAGES_UP_TO_VERDICT: tuple[Stage[object], ...] = (
    *PREPARATION_STAGES,
    serving.serve_baseline,
    serving.serve_candidate,
    *COMPARISON_STAGES,
)
