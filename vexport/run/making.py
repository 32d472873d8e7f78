"""The stages that make the checkpoint and check it: plan, quantize, check."""

from dataclasses import replace
from functools import partial

from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checks import check_checkpoint
from vexport.checks.vllm.unjudged import NAMES
from vexport.fidelity.dequantize import changed_tensors, layer_errors
from vexport.files import to_json, write_text
from vexport.plan.build import build_plan, require_accepted
from vexport.plan.smoothing import smoothing_for
from vexport.quantize.job import QuantizeJob, write_checkpoint
from vexport.reports.rounding import fallback_findings
from vexport.run.choosing import chosen_rules, rule_inputs
from vexport.run.directory import LAYERS, ROUNDING, Digests, rounding_of
from vexport.run.state import CALIBRATION, PLAN, WRITTEN, Run
from vexport.types import CheckReport, LayerErrors, Plan


def plan(run: Run) -> Plan:
    """The plan by the rules that were chosen; InputError for refusals, which are left to be read."""
    plan = build_plan(run.index, chosen_rules(run), run.planning)
    run.keep(PLAN, plan)
    require_accepted(plan)
    return plan


def checkpoint_inputs(run: Run) -> Digests:
    """Digests of the inputs of the checkpoint."""
    return rule_inputs(run, chosen_rules(run))


def write(run: Run) -> SourceIndex:
    """The quantized checkpoint."""
    job = QuantizeJob(
        source=run.scenario.source,
        out=run.checkpoint,
        rules=chosen_rules(run),
        planning=run.planning,
        calibration=run.scenario.calibration,
        overwrite=True,
        trust_remote_code=run.options.trust_remote_code,
        on_progress=run.options.on_progress,
    )
    plan, calibration = run.result(PLAN), run.get(CALIBRATION)
    if calibration is not None:
        calibration = replace(calibration, smoothing=smoothing_for(plan, calibration.smoothing))
    _, rounding = write_checkpoint(job, run.index, plan, calibration)
    if rounding is None:
        (run.folder / ROUNDING).unlink(missing_ok=True)
    else:
        write_text(run.folder / ROUNDING, to_json(rounding))
    return read_index(run.checkpoint)


def check(run: Run) -> CheckReport:
    """Static findings, and whether what should have been copied was; each layer's error in its own file."""
    plan, written = run.result(PLAN), run.result(WRITTEN)
    report = check_checkpoint(str(run.checkpoint))
    lost = tuple(changed_tensors(run.index, written, plan))
    findings = (*report.findings, *lost, *fallback_findings(rounding_of(run.folder)))
    on_layer = partial(run.options.on_progress, "read back (layers)")
    layers = LayerErrors(layers=layer_errors(run.index, written, plan, on_layer=on_layer))
    write_text(run.folder / LAYERS, to_json(layers))
    # Names and shapes vLLM judges in the stages that follow.
    not_judged = tuple(each for each in report.not_judged if each.what != NAMES)
    return replace(report, ok=report.ok and not lost, findings=findings, not_judged=not_judged)
