"""List the stages of a run up to the verdict, in their order."""

from vexport.run import making, proving
from vexport.run.directory import Stage

# Stages before the first engine starts.
PREPARING: tuple[Stage[object], ...] = (
    making.plan_candidates,
    proving.resolve_prompting,
    making.calibrate,
    making.measure_sensitivity,
    making.choose_auto_schemes,
    making.make_plan,
    making.quantize,
    making.check,
    proving.dry_load,
)
# Stages after both models have answered.
COMPARING: tuple[Stage[object], ...] = (
    proving.load_baseline,
    proving.load_candidate,
    proving.measure_drift,
    proving.judge,
)
ANSWERING: tuple[Stage[object], ...] = (
    *PREPARING,
    proving.serve_baseline,
    proving.serve_candidate,
    *COMPARING,
)
