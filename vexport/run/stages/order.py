"""List the stages of a run up to the verdict, in their order."""

from vexport.run.directory import Stage
from vexport.run.stages import making, serving

# Stages before the first engine starts.
PREPARING: tuple[Stage[object], ...] = (
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
# Stages after both models have answered.
COMPARING: tuple[Stage[object], ...] = (
    serving.load_baseline,
    serving.load_candidate,
    serving.measure_drift,
    serving.judge,
)
ANSWERING: tuple[Stage[object], ...] = (
    *PREPARING,
    serving.serve_baseline,
    serving.serve_candidate,
    *COMPARING,
)
