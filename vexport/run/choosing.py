"""The stages that settle which layer gets which scheme: by the rules, or by measured losses."""

from dataclasses import replace

from vexport.calibration.model import default_device
from vexport.checkpoint.index import folder_digest
from vexport.plan.build import build_plan, require_accepted
from vexport.plan.needs import calibration_need
from vexport.plan.smoothing import smoothing_strength
from vexport.quantize.samples import PlanText, calibration_samples, require_calibration
from vexport.run.directory import Digests, data_digest, value_digest
from vexport.run.state import CALIBRATION, CANDIDATES, MIXED, PLAN, SENSITIVITY, Run
from vexport.scenario import Rule
from vexport.scenario import Sensitivity as SensitivitySettings
from vexport.sensitivity import measure as losses
from vexport.sensitivity.auto import mixed_scheme, require_in_reach
from vexport.sensitivity.layer_groups import probe_plan, rest_bytes, rules_with
from vexport.types import Calibration, FusionGroup, MixedScheme, Plan, Sensitivity
from vexport.version import __version__


def is_mixed(run: Run) -> bool:
    """Return whether a rule leaves the choice of schemes to a budget."""
    return run.scenario.is_mixed


def plan_candidates(run: Run) -> Plan:
    """Plan what calibration has to serve: the rules, or with `auto` every candidate.

    Raises InputError for refusals that no choice changes; the plan is left to be read.
    """
    if is_mixed(run):
        plain = build_plan(run.index, rules_with((), {}, run.scenario.rules), run.planning)
        if run.scenario.auto is not None:
            require_in_reach(run.index, run.units, plain, run.scenario.auto)
        asked = run.planning
        smoothing = smoothing_strength(_candidates(run), asked.smoothing, has_text=asked.has_text)
        return replace(probe_plan(plain, run.units), smoothing=smoothing)
    plan = build_plan(run.index, run.scenario.rules, run.planning)
    if plan.refusals:
        run.keep(PLAN, plan)
    require_accepted(plan)
    return plan


def _candidates(run: Run) -> tuple[FusionGroup, ...]:
    """The groups of all that could be chosen."""
    return tuple(group for unit in run.units for option in unit.options for group in option.groups)


def needs_samples(run: Run) -> bool:
    """Return whether samples are to be run; InputError where the plan needs them and there are none."""
    plan = run.result(CANDIDATES)
    require_calibration(plan, run.scenario.calibration)
    return calibration_need(plan) is not None


def calibrate(run: Run) -> Calibration:
    """Run the samples through the source."""
    text = PlanText(
        run.index,
        run.result(CANDIDATES),
        run.scenario.calibration,
        on_progress=run.options.on_progress,
        trust_remote_code=run.options.trust_remote_code,
    )
    return text.calibrate(_candidates(run) if is_mixed(run) else ())


def is_sensitivity_asked(run: Run) -> bool:
    """Return whether the scenario asks for losses."""
    return is_mixed(run) or run.scenario.sensitivity is not None


def measure(run: Run) -> Sensitivity:
    """Measure what quantizing each unit costs, on the first samples; see `vexport.sensitivity.measure`."""
    settings, how = run.scenario.calibration, run.scenario.sensitivity or SensitivitySettings()
    assert settings is not None, "a scenario whose losses are asked for has a calibration"
    trust = run.options.trust_remote_code
    return losses.measure(
        run.index,
        run.units,
        run.get(CALIBRATION) or Calibration(rows=(), digest="", tokens=0, ranges={}),
        calibration_samples(run.index, settings, how.samples, trust_remote_code=trust),
        file=run.folder / "sensitivity" / "trials.json",
        on_progress=run.options.on_progress,
        trust_remote_code=trust,
        device=settings.device or default_device(),
    )


def choose(run: Run) -> MixedScheme:
    """Choose the schemes of `auto` within its budget."""
    assert run.scenario.auto is not None
    return mixed_scheme(
        run.result(SENSITIVITY).groups,
        {unit.name: unit.allowed for unit in run.units},
        run.scenario.auto,
        rest_bytes=rest_bytes(run.index, run.units, run.result(CANDIDATES)),
        source_bytes=run.index.num_bytes,
        parameters=run.index.num_parameters,
    )


def chosen_rules(run: Run) -> tuple[Rule, ...]:
    """The scenario's rules, and before them one for each layer that they do not decide about alone."""
    mixed = run.get(MIXED)
    if mixed is None:
        return run.scenario.rules
    schemes = {unit.name: unit.allowed[0] for unit in run.units}
    chosen = {choice.name: choice.scheme for choice in mixed.choices}
    return rules_with(run.units, schemes | chosen, run.scenario.rules)


def scenario_inputs(run: Run) -> Digests:
    """Digests of the inputs of what depends on the scenario's own rules."""
    return rule_inputs(run, run.scenario.rules)


def sensitivity_inputs(run: Run) -> Digests:
    """Digests of the inputs of the losses."""
    settings = run.scenario.sensitivity
    digest = value_digest(settings.model_dump(mode="json") if settings else None)
    return {**scenario_inputs(run), "sensitivity": digest}


def rule_inputs(run: Run, rules: tuple[Rule, ...]) -> Digests:
    """Digests of the inputs of a checkpoint by these rules."""
    settings = run.scenario.calibration
    digests = {
        "vexport": __version__,
        "source": folder_digest(run.index.root),
        "rules": value_digest([rule.model_dump() for rule in rules]),
        "calibration": value_digest(settings.model_dump(mode="json") if settings else None),
    }
    if run.scenario.auto:
        digests["candidates"] = value_digest(list(run.scenario.auto.candidates))
    return digests | ({"calibration data": data_digest(settings)} if settings else {})
