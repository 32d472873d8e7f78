"""What quantizing by a plan needs beyond the weights: calibration data, a search for scales."""

from vexport.formats.schemes import get_scheme
from vexport.types import Plan, observer_names


def needs_calibration(plan: Plan) -> bool:
    """Whether a scheme of the plan has static scales of inputs, or of keys and values."""
    return bool(plan.attention) or any(get_scheme(name).args.calibrated for name in plan.schemes)


def uses_calibration(plan: Plan) -> bool:
    """Whether samples change the plan's output: static input scales, or weights searched by importance."""
    return needs_calibration(plan) or any(
        group.observer == observer_names.IMPORTANCE for group in plan.groups
    )


def needs_search(plan: Plan) -> bool:
    """Whether an observer of the plan searches for scales instead of taking those of the range."""
    return any(group.observer not in observer_names.MIN_MAX for group in plan.groups)
