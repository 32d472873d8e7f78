"""Run the stages that make the checkpoint.

They choose the scheme of each layer, by rules or by measured losses. They calibrate and quantize,
and check the written checkpoint.
"""

from dataclasses import replace
from functools import partial

from vexport.calibration.model import default_device
from vexport.checkpoint.index import SourceIndex, folder_digest, read_index
from vexport.checks import NAMES, SOURCE_FAMILIES, check_checkpoint, header_findings, is_ok
from vexport.checks.shards import VALUES
from vexport.fidelity.dequantize import changed_tensors, layer_errors
from vexport.files import to_json, write_text
from vexport.formats.plan import FusionGroup, Plan
from vexport.plan.build import build_plan, require_accepted
from vexport.plan.rules import calibration_need, select_smoothing, smoothing_strength
from vexport.quantize.auto import budget_of, choose_schemes, require_in_reach
from vexport.quantize.job import QuantizeJob, write_checkpoint
from vexport.quantize.layer_groups import probe_plan, rules_with_schemes
from vexport.quantize.plan_calibration import PlanCalibration
from vexport.quantize.samples import calibration_samples, require_calibration
from vexport.quantize.sensitivity import measure
from vexport.quantize.warnings import fallback_findings
from vexport.records import (
    CalibrationRecord,
    CheckReport,
    GroupSensitivities,
    LayerErrors,
    MixedScheme,
    merged,
)
from vexport.records.calibration import NO_CALIBRATION
from vexport.records.shared_faults import shared_as_warnings
from vexport.run.directory import (
    CHECKPOINT,
    LAYERS,
    ROUNDING,
    Digests,
    Run,
    Stage,
    data_digest,
    rounding_of,
    value_digest,
)
from vexport.scenario import Rule, Sensitivity
from vexport.version import __version__


def _rule_inputs(run: Run, rules: tuple[Rule, ...]) -> Digests:
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


def checkpoint_inputs(run: Run) -> Digests:
    """Return digests of the inputs of the checkpoint."""
    return _rule_inputs(run, _chosen_rules(run))


def _candidate_groups(run: Run) -> tuple[FusionGroup, ...]:
    return tuple(
        group for unit in run.layer_groups for option in unit.options for group in option.groups
    )


@partial(Stage, "plan candidates", Plan, makes_checkpoint=True)
def plan_candidates(run: Run) -> Plan:
    """Make the plan for calibration: by the rules, or with `auto` for every candidate.

    Raises InputError if the rules' plan is refused, or if no choice of candidates fits the budget.
    A refused plan of rules is still written to its file.
    """
    if run.scenario.is_mixed:
        plain = build_plan(run.index, rules_with_schemes((), {}, run.scenario.rules), run.planning)
        if run.scenario.auto is not None:
            require_in_reach(
                run.layer_groups, budget_of(run.index, run.layer_groups, plain, run.scenario.auto)
            )
        asked = run.planning
        smoothing = smoothing_strength(
            _candidate_groups(run), asked.smoothing, has_text=asked.has_text
        )
        return replace(probe_plan(plain, run.layer_groups), smoothing=smoothing)
    return _accepted_plan(run, run.scenario.rules)


def _accepted_plan(run: Run, rules: tuple[Rule, ...]) -> Plan:
    """Make the plan by these rules.

    Raises InputError if parts of the plan are refused. The plan is still written to its file.
    """
    plan = build_plan(run.index, rules, run.planning)
    if plan.refusals:
        run.store(make_plan, plan)
    require_accepted(plan)
    return plan


def _needs_samples(run: Run) -> bool:
    """Return True if the plan needs a calibration run.

    Raises InputError if the plan needs samples and there are none.
    """
    plan = run.result(plan_candidates)
    require_calibration(plan, run.scenario.calibration)
    return calibration_need(plan) is not None


@partial(
    Stage,
    "calibrate",
    CalibrationRecord,
    file="calibration/statistics.json",
    when=_needs_samples,
    digest=lambda run: _rule_inputs(run, run.scenario.rules),
    makes_checkpoint=True,
)
def calibrate(run: Run) -> CalibrationRecord:
    """Run the samples through the source."""
    text = PlanCalibration(
        run.index,
        run.result(plan_candidates),
        run.scenario.calibration,
        on_progress=run.options.on_progress,
        trust_remote_code=run.options.trust_remote_code,
    )
    text.note_duration()
    return text.calibrate(_candidate_groups(run) if run.scenario.is_mixed else ())


def _sensitivity_inputs(run: Run) -> Digests:
    settings = run.scenario.sensitivity
    digest = value_digest(settings.model_dump(mode="json") if settings else None)
    return {**_rule_inputs(run, run.scenario.rules), "sensitivity": digest}


@partial(
    Stage,
    "sensitivity",
    GroupSensitivities,
    file="sensitivity.json",
    writes=("sensitivity/trials.json",),
    when=lambda run: run.scenario.is_mixed or run.scenario.sensitivity is not None,
    digest=_sensitivity_inputs,
    makes_checkpoint=True,
)
def measure_sensitivity(run: Run) -> GroupSensitivities:
    """Measure the loss from quantizing each layer group, on the first samples.

    See `vexport.quantize.sensitivity`.
    """
    settings, how = run.scenario.calibration, run.scenario.sensitivity or Sensitivity()
    assert settings is not None, "a scenario that measures losses has a calibration"
    trust = run.options.trust_remote_code
    return measure(
        run.index,
        run.layer_groups,
        run.get(calibrate) or NO_CALIBRATION,
        calibration_samples(run.index, settings, how.samples, trust_remote_code=trust),
        file=run.folder / "sensitivity" / "trials.json",
        on_progress=run.options.on_progress,
        trust_remote_code=trust,
        device=settings.device or default_device(),
    )


@partial(
    Stage,
    "choose",
    MixedScheme,
    file="mixed.json",
    when=lambda run: run.scenario.is_mixed,
    makes_checkpoint=True,
)
def choose_auto_schemes(run: Run) -> MixedScheme:
    """Choose the schemes of `auto` within its budget."""
    assert run.scenario.auto is not None
    budget = budget_of(run.index, run.layer_groups, run.result(plan_candidates), run.scenario.auto)
    return choose_schemes(run.result(measure_sensitivity).groups, run.layer_groups, budget)


def _chosen_rules(run: Run) -> tuple[Rule, ...]:
    """Return the scenario's rules. With `auto`, rules for each layer group come before them."""
    mixed = run.get(choose_auto_schemes)
    if mixed is None:
        return run.scenario.rules
    schemes = {unit.name: unit.allowed[0] for unit in run.layer_groups}
    chosen = {choice.name: choice.scheme for choice in mixed.choices}
    return rules_with_schemes(run.layer_groups, schemes | chosen, run.scenario.rules)


@partial(Stage, "plan", Plan, file="plan.json", makes_checkpoint=True)
def make_plan(run: Run) -> Plan:
    """Make the plan by the chosen rules."""
    return _accepted_plan(run, _chosen_rules(run))


@partial(
    Stage,
    "quantize",
    SourceIndex,
    file=CHECKPOINT,
    digest=checkpoint_inputs,
    writes=(ROUNDING,),
    makes_checkpoint=True,
)
def quantize(run: Run) -> SourceIndex:
    """Write the quantized checkpoint."""
    job = QuantizeJob(
        source=run.scenario.source,
        out=run.checkpoint,
        rules=_chosen_rules(run),
        planning=run.planning,
        calibration=run.scenario.calibration,
        overwrite=True,
        trust_remote_code=run.options.trust_remote_code,
        on_progress=run.options.on_progress,
    )
    plan, calibration = run.result(make_plan), run.get(calibrate)
    if calibration is not None:
        calibration = replace(calibration, smoothing=select_smoothing(plan, calibration.smoothing))
    _, rounding = write_checkpoint(job, run.index, plan, calibration)
    if rounding is None:
        (run.folder / ROUNDING).unlink(missing_ok=True)
    else:
        write_text(run.folder / ROUNDING, to_json(rounding))
    return read_index(run.checkpoint)


@partial(
    Stage,
    "check",
    CheckReport,
    file="check.json",
    digest=checkpoint_inputs,
    writes=(LAYERS,),
    makes_checkpoint=True,
)
def check(run: Run) -> CheckReport:
    """Check the written checkpoint, and check that unquantized tensors are unchanged.

    The errors of all layers are written to `LAYERS`.
    """
    plan, written = run.result(make_plan), run.result(quantize)
    report = check_checkpoint(str(run.checkpoint))
    source = run.index.root
    of_source = header_findings(source, families=SOURCE_FAMILIES)
    found = shared_as_warnings(report.findings, run.checkpoint, of_source, source)
    lost = changed_tensors(run.index, written, plan)
    findings = merged((*found, *lost, *fallback_findings(rounding_of(run.folder))))
    on_layer = partial(run.options.on_progress, "read back (layers)")
    layers = LayerErrors(layers=layer_errors(run.index, written, plan, on_layer=on_layer))
    write_text(run.folder / LAYERS, to_json(layers))
    # Later stages check names and shapes in vLLM. `layer_errors` compares the values.
    judged_here = (NAMES, VALUES)
    not_judged = tuple(each for each in report.not_judged if each.what not in judged_here)
    return replace(report, ok=is_ok(findings), findings=findings, not_judged=not_judged)
