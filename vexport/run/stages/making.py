"""Run the stages that make the checkpoint.

They choose the scheme of each layer, by rules or by measured losses. They calibrate and quantize,
and check the written checkpoint.
"""

from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from vexport.calibration.data import first_texts
from vexport.calibration.model import default_device
from vexport.checkpoint.index import SourceIndex, folder_digest, read_index
from vexport.checkpoint.source import parse_data, resolve_source
from vexport.checks import NAMES, SOURCE_FAMILIES, check_checkpoint, header_findings, is_ok
from vexport.checks.ignoring import without_ignored
from vexport.checks.shards import VALUES
from vexport.engine.dry.load import dry_load_checkpoints
from vexport.fidelity.dequantize import changed_tensors, layer_errors
from vexport.files import to_json, write_text
from vexport.formats.plan import FusionGroup, Plan
from vexport.inference.options import NO_EVALUATION, EngineOptions
from vexport.inference.prompts import CONTINUED_PROMPTS
from vexport.names import Folder
from vexport.plan.build import PlanSettings, build_plan, require_accepted
from vexport.plan.rules import calibration_need, select_smoothing, smoothing_strength
from vexport.plan.source import scenario_settings, source_index
from vexport.quantize.auto import budget_of, choose_schemes, require_in_reach
from vexport.quantize.job import QuantizeJob, write_checkpoint
from vexport.quantize.layer_groups import (
    LayerGroup,
    find_layer_groups,
    probe_plan,
    rules_with_schemes,
)
from vexport.quantize.plan_calibration import PlanCalibration
from vexport.quantize.samples import calibration_samples, require_calibration
from vexport.quantize.sensitivity import measure
from vexport.quantize.warnings import fallback_findings
from vexport.records import (
    CalibrationRecord,
    CheckReport,
    DryLoadReport,
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
    RunDirectory,
    data_digest,
    rounding_of,
    value_digest,
)
from vexport.run.work import Place, Stage, Work
from vexport.scenario import Evaluate, Rule, Scenario, Sensitivity
from vexport.scenario.serve import Serve
from vexport.version import __version__


class Maker(Work):
    """A scenario that makes a checkpoint in a run directory."""

    def __init__(self, scenario: Scenario, directory: RunDirectory, options: EngineOptions) -> None:
        super().__init__(directory, options, {"": Place(folder=directory.root)})
        self.scenario = scenario

    @property
    def checkpoint(self) -> Path:
        """Return the folder of the checkpoint."""
        return self.folder / CHECKPOINT

    @property
    def planning(self) -> PlanSettings:
        """Return the settings of the plan, without the rules."""
        return scenario_settings(self.scenario)

    @property
    def evaluation(self) -> Evaluate:
        """Return the settings of the evaluation, without tasks and text if nothing is evaluated."""
        return self.scenario.evaluate or NO_EVALUATION

    @cached_property
    def index(self) -> SourceIndex:
        """Return the source's headers."""
        return source_index(
            self.scenario.source,
            self.scenario.rules,
            self.options.on_progress,
            trust_remote_code=self.options.trust_remote_code,
        )

    @cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Return the groups of layers that can be given a scheme independently of other layers."""
        return find_layer_groups(self.index, self.scenario.rules, self.scenario.auto, self.planning)

    @cached_property
    def baseline(self) -> Path:
        """Return the folder of the checkpoint's baseline, which is downloaded first."""
        return resolve_source(
            self.evaluation.baseline or self.scenario.source, self.options.on_progress
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the first halves of calibration texts, for the models to continue.

        Only local text and the default text are used.
        """
        settings, most = (
            self.scenario.calibration,
            max(CONTINUED_PROMPTS, self.evaluation.kl_prompts),
        )
        sources = settings.sources() if settings is not None else ()
        local = [data for data in sources if parse_data(data.name).kind != "hub"]
        texts = [text for data in local for text in first_texts(data, most)][:most]
        return tuple(
            text[: text.rfind(" ", 0, len(text) // 2 + 1)] for text in texts if " " in text
        )


def _rule_inputs(maker: Maker, rules: tuple[Rule, ...]) -> Digests:
    settings = maker.scenario.calibration
    digests = {
        "vexport": __version__,
        "source": folder_digest(maker.index.root),
        "rules": value_digest([rule.model_dump() for rule in rules]),
        "calibration": value_digest(settings.model_dump(mode="json") if settings else None),
    }
    if maker.scenario.auto:
        digests["candidates"] = value_digest(list(maker.scenario.auto.candidates))
    return digests | ({"calibration data": data_digest(settings)} if settings else {})


def checkpoint_inputs(maker: Maker) -> Digests:
    """Return digests of the inputs of the checkpoint."""
    return _rule_inputs(maker, _chosen_rules(maker))


def _candidate_groups(maker: Maker) -> tuple[FusionGroup, ...]:
    return tuple(
        group for unit in maker.layer_groups for option in unit.options for group in option.groups
    )


@partial(Stage, "plan candidates", Plan)
def plan_candidates(maker: Maker) -> Plan:
    """Make the plan for calibration: by the rules, or with `auto` for every candidate.

    Raises InputError if the rules' plan is refused, or if no choice of candidates fits the budget.
    A refused plan of rules is still written to its file.
    """
    if maker.scenario.is_mixed:
        plain = build_plan(
            maker.index, rules_with_schemes((), {}, maker.scenario.rules), maker.planning
        )
        if maker.scenario.auto is not None:
            require_in_reach(
                maker.layer_groups,
                budget_of(maker.index, maker.layer_groups, plain, maker.scenario.auto),
            )
        asked = maker.planning
        smoothing = smoothing_strength(
            _candidate_groups(maker), asked.smoothing, has_text=asked.has_text
        )
        return replace(probe_plan(plain, maker.layer_groups), smoothing=smoothing)
    return _accepted_plan(maker, maker.scenario.rules)


def _accepted_plan(maker: Maker, rules: tuple[Rule, ...]) -> Plan:
    """Make the plan by these rules.

    Raises InputError if parts of the plan are refused. The plan is still written to its file.
    """
    plan = build_plan(maker.index, rules, maker.planning)
    if plan.refusals:
        maker.store(make_plan, plan)
    require_accepted(plan)
    return plan


def _needs_samples(maker: Maker) -> bool:
    """Return True if the plan needs a calibration run.

    Raises InputError if the plan needs samples and there are none.
    """
    plan = maker.result(plan_candidates)
    require_calibration(plan, maker.scenario.calibration)
    return calibration_need(plan) is not None


@partial(
    Stage,
    "calibrate",
    CalibrationRecord,
    file="calibration/statistics.json",
    when=_needs_samples,
    digest=lambda maker: _rule_inputs(maker, maker.scenario.rules),
    files=lambda record: record.files,
)
def calibrate(maker: Maker) -> CalibrationRecord:
    """Run the samples through the source."""
    text = PlanCalibration(
        maker.index,
        maker.result(plan_candidates),
        maker.scenario.calibration,
        on_progress=maker.options.on_progress,
        trust_remote_code=maker.options.trust_remote_code,
    )
    text.note_duration()
    return text.calibrate(_candidate_groups(maker) if maker.scenario.is_mixed else ())


def _sensitivity_inputs(maker: Maker) -> Digests:
    settings = maker.scenario.sensitivity
    digest = value_digest(settings.model_dump(mode="json") if settings else None)
    return {**_rule_inputs(maker, maker.scenario.rules), "sensitivity": digest}


@partial(
    Stage,
    "sensitivity",
    GroupSensitivities,
    file="sensitivity.json",
    writes=("sensitivity/trials.json",),
    when=lambda maker: maker.scenario.is_mixed or maker.scenario.sensitivity is not None,
    digest=_sensitivity_inputs,
)
def measure_sensitivity(maker: Maker) -> GroupSensitivities:
    """Measure the loss from quantizing each layer group, on the first samples.

    See `vexport.quantize.sensitivity`.
    """
    settings, how = maker.scenario.calibration, maker.scenario.sensitivity or Sensitivity()
    assert settings is not None, "a scenario that measures losses has a calibration"
    trust = maker.options.trust_remote_code
    return measure(
        maker.index,
        maker.layer_groups,
        maker.get(calibrate) or NO_CALIBRATION,
        calibration_samples(maker.index, settings, how.samples, trust_remote_code=trust),
        file=maker.folder / "sensitivity" / "trials.json",
        on_progress=maker.options.on_progress,
        trust_remote_code=trust,
        device=settings.device or default_device(),
    )


@partial(
    Stage,
    "choose",
    MixedScheme,
    file="mixed.json",
    when=lambda maker: maker.scenario.is_mixed,
)
def choose_auto_schemes(maker: Maker) -> MixedScheme:
    """Choose the schemes of `auto` within its budget."""
    assert maker.scenario.auto is not None
    budget = budget_of(
        maker.index, maker.layer_groups, maker.result(plan_candidates), maker.scenario.auto
    )
    return choose_schemes(maker.result(measure_sensitivity).groups, maker.layer_groups, budget)


def _chosen_rules(maker: Maker) -> tuple[Rule, ...]:
    mixed = maker.get(choose_auto_schemes)
    if mixed is None:
        return maker.scenario.rules
    schemes = {unit.name: unit.allowed[0] for unit in maker.layer_groups}
    chosen = {choice.name: choice.scheme for choice in mixed.choices}
    return rules_with_schemes(maker.layer_groups, schemes | chosen, maker.scenario.rules)


@partial(Stage, "plan", Plan, file="plan.json")
def make_plan(maker: Maker) -> Plan:
    """Make the plan by the chosen rules."""
    return _accepted_plan(maker, _chosen_rules(maker))


@partial(
    Stage,
    "quantize",
    SourceIndex,
    file=CHECKPOINT,
    digest=checkpoint_inputs,
    writes=(ROUNDING,),
)
def quantize(maker: Maker) -> SourceIndex:
    """Write the quantized checkpoint."""
    job = QuantizeJob(
        source=maker.scenario.source,
        out=maker.checkpoint,
        rules=_chosen_rules(maker),
        planning=maker.planning,
        calibration=maker.scenario.calibration,
        overwrite=True,
        trust_remote_code=maker.options.trust_remote_code,
        on_progress=maker.options.on_progress,
    )
    plan, calibration = maker.result(make_plan), maker.get(calibrate)
    if calibration is not None:
        calibration = replace(calibration, smoothing=select_smoothing(plan, calibration.smoothing))
    _, rounding = write_checkpoint(job, maker.index, plan, calibration)
    if rounding is None:
        (maker.folder / ROUNDING).unlink(missing_ok=True)
    else:
        write_text(maker.folder / ROUNDING, to_json(rounding))
    return read_index(maker.checkpoint)


@partial(
    Stage,
    "check",
    CheckReport,
    file="check.json",
    digest=checkpoint_inputs,
    writes=(LAYERS,),
)
def check(maker: Maker) -> CheckReport:
    """Check the written checkpoint, and check that unquantized tensors are unchanged.

    The errors of all layers are written to `LAYERS`.
    """
    plan, written = maker.result(make_plan), maker.result(quantize)
    report = check_checkpoint(str(maker.checkpoint))
    source = maker.index.root
    of_source = header_findings(source, families=SOURCE_FAMILIES)
    found = shared_as_warnings(report.findings, maker.checkpoint, of_source, source)
    lost = changed_tensors(maker.index, written, plan)
    findings = merged((*found, *lost, *fallback_findings(rounding_of(maker.folder))))
    on_layer = partial(maker.options.on_progress, "read back (layers)")
    layers = LayerErrors(layers=layer_errors(maker.index, written, plan, on_layer=on_layer))
    write_text(maker.folder / LAYERS, to_json(layers))
    # Later stages check names and shapes in vLLM. `layer_errors` compares the values.
    judged_here = (NAMES, VALUES)
    not_judged = tuple(each for each in report.not_judged if each.what not in judged_here)
    return replace(report, ok=is_ok(findings), findings=findings, not_judged=not_judged)


def checked(maker: Maker) -> CheckReport:
    """Return the result of the check without the findings of the scenario's ignored rules."""
    return without_ignored(maker.result(check), maker.scenario.check.ignore_rules)


def _device_inputs(maker: Maker) -> Digests:
    serve = maker.options.serve
    return {
        **checkpoint_inputs(maker),
        "serve devices": value_digest([serve.dry_ranks, serve.compute]),
    }


@partial(
    Stage,
    "dry load",
    DryLoadReport,
    file="dry-load.json",
    when=lambda maker: checked(maker).ok and bool(maker.options.serve.capabilities),
    digest=_device_inputs,
)
def dry_load(maker: Maker) -> DryLoadReport:
    """Load the checkpoint dry for each GPU of the scenario and each tensor parallel size.

    The scenario's arguments of vLLM are for the engines on this machine, so they are not used.
    """
    serve = maker.options.serve
    (report,) = dry_load_checkpoints(
        [Folder.at(maker.checkpoint)],
        [maker.options.vllm_python],
        tp=serve.dry_ranks,
        sm=serve.capabilities,
        trust_remote_code=maker.options.trust_remote_code,
        serve=Serve(timeout=serve.timeout),
        on_progress=maker.options.on_progress,
    )
    return report


MAKING: tuple[Stage[object], ...] = (
    calibrate,
    measure_sensitivity,
    choose_auto_schemes,
    make_plan,
    quantize,
    check,
    dry_load,
)
"""The stages after `plan_candidates`."""
