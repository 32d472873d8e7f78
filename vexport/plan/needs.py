"""The needs of a plan beyond the weights: calibration data, a search for scales."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vexport.errors import InputError
from vexport.formats.schemes import KEEP, get_scheme, scheme_names
from vexport.plan.build import PlanSettings
from vexport.records import KvCache, Plan, observer_names
from vexport.scenario import AUTO, Calibration, Rule, Scenario, default_calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationNeed:
    """The first part of a plan that samples change, and what they are for."""

    where: str
    samples: str

    def missing(self) -> InputError:
        """The error where there are none."""
        return InputError(
            self.where,
            got="no calibration data",
            need=self.samples,
            fix="add --calibration DATA (or `calibration:` to the scenario); `default` is vexport's own text",
        )


def calibration_need(plan: Plan) -> CalibrationNeed | None:
    """The need of a plan for calibration: statistics, smoothing, or weights rounded by their inputs.

    None where samples would change nothing.
    """
    static = [f"scheme {name}" for name in plan.schemes if get_scheme(name).args.calibrated]
    if plan.attention:
        static.append("KV cache")
    if static:
        return CalibrationNeed(where=static[0], samples="samples for its static scales")
    for group in plan.groups:
        if group.rounding == "nearest" and group.observer in observer_names.BY_IMPORTANCE:
            where = f"observer {group.observer}"
            return CalibrationNeed(where=where, samples="samples that show importance")
    if plan.smoothing:
        return CalibrationNeed(where="smoothing", samples="samples that show which channels are large")
    rounded = next((group.rounding for group in plan.groups if group.rounding != "nearest"), None)
    if rounded is None:
        return None
    return CalibrationNeed(where=f"rounding {rounded}", samples="samples that show what enters each layer")


def default_text_note(rules: Sequence[Rule]) -> str:
    """The note where no text was named that the rules need, with the schemes that need none."""
    asked = {rule.scheme: _without_text(rule.scheme) for rule in rules if rule.scheme not in (KEEP, AUTO)}
    others = [f"; {other} instead of {name} needs no text" for name, other in asked.items() if other]
    return (
        "no calibration data was named: vexport's own text is used (`default`); "
        f"text like what the model will serve gives better scales{''.join(others)}"
    )


def _without_text(name: str) -> str | None:
    """The first scheme that stores weights in the same format and needs no text, for one that does."""
    scheme = get_scheme(name)
    others = map(get_scheme, scheme_names()) if scheme.args.calibrated else ()
    fitting = (other for other in others if other.format is scheme.format and not other.args.calibrated)
    return next((other.name for other in fitting), None)


def rules_need_calibration(
    rules: Sequence[Rule], kv_cache: KvCache | None, smoothing: float | None = None
) -> bool:
    """Return whether a plan by these rules may need samples; it does unless they match no layer."""
    return (
        kv_cache is not None
        or bool(smoothing)
        or any(
            rule.method not in (None, "nearest")
            or rule.observer in observer_names.BY_IMPORTANCE
            or get_scheme(rule.scheme).args.calibrated
            for rule in rules
            if rule.scheme not in (KEEP, AUTO)
        )
    )


def rounded_to_nearest(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules where text is vexport's own: those that name no rounding do not round by it."""
    return tuple(
        rule.model_copy(update={"rounding": "nearest"}) if rule.rounding is None else rule for rule in rules
    )


def with_needed_text(
    rules: Sequence[Rule], settings: PlanSettings, text: Calibration | None, default: Calibration
) -> tuple[tuple[Rule, ...], PlanSettings, Calibration | None]:
    """The same, with the `default` text where rules need one and none is named."""
    if text is None and rules_need_calibration(rules, settings.kv_cache, settings.smoothing):
        return rounded_to_nearest(rules), replace(settings, has_text=True), default
    return tuple(rules), replace(settings, has_text=text is not None), text


def with_default_text(scenarios: Sequence[Scenario], note: Callable[[str], None]) -> list[Scenario]:
    """Scenarios of one kind; where one needs text and none is named, all with vexport's own, and a note."""
    if not any(
        scenario.calibration is None
        and rules_need_calibration(scenario.rules, scenario.kv_cache, scenario.smoothing)
        for scenario in scenarios
    ):
        return list(scenarios)
    note(default_text_note([rule for scenario in scenarios for rule in scenario.rules]))
    text = default_calibration()
    return [
        scenario.model_copy(update={"calibration": text, "rules": rounded_to_nearest(scenario.rules)})
        for scenario in scenarios
    ]


def needs_rounding(plan: Plan) -> bool:
    """Return whether weights of the plan are rounded by what calibration text shows."""
    return any(group.rounding != "nearest" for group in plan.groups)


def needs_search(plan: Plan) -> bool:
    """Return whether an observer of the plan searches for scales instead of taking those of the range."""
    return any(group.observer not in observer_names.MIN_MAX for group in plan.groups)
