"""Run the last stages of a run: the outcome, the cause of a loss, and the report."""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vexport.checkpoint.card import inherited_card
from vexport.checkpoint.hub import pinned_name
from vexport.checkpoint.index import SourceIndex, find_quantization, read_index
from vexport.checks.vllm.stored_schemes import stored_schemes
from vexport.files import from_json, write_text
from vexport.names import HubName, SourceRef
from vexport.outputs.manifest import record
from vexport.records import (
    Attribution,
    CheckReport,
    ComparedVariant,
    DryLoadReport,
    GivenCheckpoint,
    KindSize,
    LayerErrors,
    LoadReport,
    Outcome,
    Verdict,
)
from vexport.records.calibration import expert_coverage
from vexport.records.gates import checkpoint_gate
from vexport.reports import render
from vexport.reports.run_record import (
    Baseline,
    CalibrationSummary,
    Call,
    MadeCheckpoint,
    Report,
    Source,
)
from vexport.run.comparison import outcome_of_variants, reason_of_variants
from vexport.run.directory import (
    LAYERS,
    REPORT_FILE,
    Run,
    Stage,
    portable,
    rounding_of,
)
from vexport.run.given import Given, RunModel
from vexport.run.judging import cause_of
from vexport.run.stages import making, serving
from vexport.run.stages.variants import compare_variants_of_run
from vexport.version import __version__

# The forms of the report, by file. The page comes last, because it links to existing files.
RENDERED = {"report.md": "markdown", "junit.xml": "junit", "report.html": "html"}
MODEL_CARD = "model-card.md"
# The hub's cache: models--ORG--NAME/snapshots/REVISION (huggingface_hub.constants,
# REPO_ID_SEPARATOR).
_CACHED = re.compile(r"(?:^|/)models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")
# Folder names that only state a role. For these the parent folder's name is used instead.
_ROLES = {"model", "checkpoint", "source", "snapshot", "hf", "weights", "final", "main", "output"}


class Conclusion(NamedTuple):
    """Outcome of a run, and the sentence that justifies it."""

    outcome: Outcome
    reason: str


def _has_outcome(run: Run) -> bool:
    """Return True unless the run evaluates a given checkpoint without a baseline."""
    given = run.given
    return given is None or given.evaluate is None or given.is_compared


@partial(Stage, "conclude", Conclusion, when=_has_outcome)
def conclude(run: Run) -> Conclusion:
    """Decide the outcome from all stages."""
    if run.given is not None:
        return _conclusion_of_given(run.get(serving.judge), run.get(serving.load_candidate))
    conclusion = conclusion_of_made(
        run.result(making.check),
        run.get(serving.dry_load),
        run.get(serving.load_candidate),
        run.get(serving.judge),
    )
    results = run.get(compare_variants_of_run)
    return conclusion if results is None else _with_variants(conclusion, results.rows)


def _with_variants(conclusion: Conclusion, rows: Sequence[ComparedVariant]) -> Conclusion:
    """Return the conclusion of a run with variants.

    A failure of the checkpoint decides first, then a failure of the variants. The outcome is PASS
    only if the checkpoint and all variants pass.
    """
    outcome = outcome_of_variants(rows)
    reason = reason_of_variants(rows)
    if conclusion.outcome == "FAIL" or (conclusion.outcome != "PASS" and outcome != "FAIL"):
        return conclusion
    if outcome == "PASS":
        return Conclusion("PASS", f"{conclusion.reason}; variants: {reason}")
    return Conclusion(outcome, f"variants: {reason}")


def _conclusion_of_given(verdict: Verdict | None, loaded: LoadReport | None) -> Conclusion:
    """Decide by the verdict, or by the load if the command only loads."""
    if verdict is not None:
        return Conclusion(verdict.outcome, verdict.reason)
    assert loaded is not None
    if not loaded.ok:
        return Conclusion("FAIL", f"load: {checkpoint_gate('load', loaded).message}")
    return Conclusion("PASS", "load found no error; accuracy was not evaluated")


def conclusion_of_made(
    checked: CheckReport,
    dry: DryLoadReport | None,
    loaded: LoadReport | None,
    verdict: Verdict | None,
) -> Conclusion:
    """Decide the outcome of a checkpoint that the run made.

    The first failed stage decides. If no stage failed, the verdict decides.
    """
    for gate, found in (("check", checked), ("dry load", dry), ("load", loaded)):
        if found is not None and not found.ok:
            return Conclusion("FAIL", f"{gate}: {checkpoint_gate(gate, found).message}")
    if verdict is None:
        reason = (
            "check and load found no error; accuracy was not evaluated (no `evaluate` in "
            "the scenario)"
        )
        return Conclusion("PASS", reason)
    return Conclusion(verdict.outcome, verdict.reason)


def _wants_cause(run: Run) -> bool:
    """Return True if the run should look for the cause of a loss.

    A scenario's run also looks if the verdict is PASS, because its report shows the noise floor.
    """
    if serving.local_sessions(run) is None:
        return False
    if run.given is None:
        return run.attribution_settings.wanted is not False
    conclusion = run.get(conclude)
    return conclusion is not None and run.attribution_settings.is_due(conclusion.outcome)


@partial(Stage, "attribute", Attribution, when=_wants_cause)
def attribute(run: Run) -> Attribution | None:
    """Find the cause of a loss."""
    sessions = serving.local_sessions(run)
    assert sessions is not None
    outcome = run.result(conclude).outcome
    verdict = run.get(serving.judge)
    text = verdict.text if verdict is not None else None
    return cause_of(
        *sessions,
        run.evaluation,
        outcome,
        run.options,
        run.attribution_settings.seconds,
        nll_rise=_nll_rise(run),
        is_late=text is not None and text.fails_late,
    )


def _nll_rise(run: Run) -> float | None:
    """Return the rise of the NLL: on the held-out text in its worst bucket, or on the prompts."""
    verdict = run.get(serving.judge)
    if verdict is not None and verdict.text is not None:
        return max((limit.value for limit in verdict.text.limits if limit.is_rise), default=None)
    drift = run.get(serving.measure_drift)
    return drift.nll_rise if drift is not None else None


@partial(Stage, "report", Report, writes=(REPORT_FILE, *RENDERED), when=_has_outcome)
def report(run: Run) -> Report:
    """Write the report of the run in all its forms."""
    found = collect_report(run)
    if run.given is None:
        record(run.folder / MODEL_CARD)
        write_text(run.folder / MODEL_CARD, render(found, "card"))
    write_report(found, run.folder)
    return found


def write_report(report: Report, folder: Path) -> None:
    """Write a report to a run directory in all its forms."""
    for name, format_ in {REPORT_FILE: "json", **RENDERED}.items():
        record(folder / name)
        write_text(folder / name, render(report, format_, folder=folder))


def collect_report(run: Run) -> Report:
    """Collect all results that the run has so far."""
    return _report_on_made(run) if run.given is None else _report_on_given(run, run.given)


def _report_on_made(run: Run) -> Report:
    """Collect the results of a run that made its checkpoint."""
    conclusion = run.result(conclude)
    variants = run.get(compare_variants_of_run)
    of_baseline = run.get(serving.load_baseline)
    return Report(
        name=run.scenario.name,
        outcome=conclusion.outcome,
        reason=conclusion.reason,
        call=_call(run.seconds),
        made=_made_checkpoint(run),
        baseline=Baseline(name=portable(str(run.baseline)), load=of_baseline),
        load=run.get(serving.load_candidate),
        verdict=run.get(serving.judge),
        drift=run.get(serving.measure_drift),
        attribution=run.get(attribute),
        variants=variants.rows if variants else (),
    )


def _made_checkpoint(run: Run) -> MadeCheckpoint:
    return MadeCheckpoint(
        source=_source(run),
        plan=run.result(making.make_plan),
        sizes=size_by_kind(run.index, run.result(making.quantize)),
        layers=from_json(LayerErrors, run.folder / LAYERS).layers,
        check=run.result(making.check),
        dry_load=run.get(serving.dry_load),
        calibration=_calibration_of(run),
        rounding=rounding_of(run.folder),
        sensitivity=run.get(making.measure_sensitivity),
        mixed=run.get(making.choose_auto_schemes),
    )


def _source(run: Run) -> Source:
    root, name = run.index.root, run.scenario.source
    _, _, revision = (pinned_name(root) or "").partition("@")
    return Source(
        name=portable(str(name)),
        id=source_name(name, root),
        revision=revision,
        card=inherited_card(root),
    )


def _calibration_of(run: Run) -> CalibrationSummary | None:
    calibration, rounding = run.get(making.calibrate), rounding_of(run.folder)
    if calibration is None:
        return None
    if rounding is not None:
        calibration = rounding.completed(calibration)
    return CalibrationSummary(
        rows=len(calibration.rows),
        data=portable(calibration.data),
        digest=calibration.digest,
        experts=expert_coverage(calibration),
    )


def _report_on_given(run: Run, given: Given) -> Report:
    """Collect the results of a run with a given checkpoint."""
    conclusion = run.result(conclude)
    baseline = given.against if given.baseline is None else given.baseline.name
    load = run.get(serving.load_candidate)
    of_baseline = serving.load_of(run, serving.serve_baseline)
    return Report(
        name=given.name,
        outcome=conclusion.outcome,
        reason=conclusion.reason,
        call=_call(run.seconds),
        given=_given_checkpoint(given),
        baseline=None
        if baseline is None
        else Baseline(name=portable(str(baseline)), load=of_baseline),
        load=load or serving.load_of(run, serving.serve_candidate),
        verdict=run.get(serving.judge),
        drift=run.get(serving.measure_drift),
        attribution=run.get(attribute) if run.is_reached(attribute) else None,
    )


def variants_report(
    checkpoint: RunModel, rows: Sequence[ComparedVariant], seconds: Mapping[str, float]
) -> Report:
    """Return the report that only compares variants of a given checkpoint."""
    return Report(
        name=checkpoint.ref.title,
        outcome=outcome_of_variants(rows),
        reason=reason_of_variants(rows),
        call=_call(seconds),
        given=_description(checkpoint, None),
        baseline=Baseline(name=rows[0].name),
        variants=tuple(rows),
    )


def _given_checkpoint(given: Given) -> GivenCheckpoint:
    """Describe the checkpoint of a run with given models."""
    return _description(given.candidate, given.baseline)


def _description(checkpoint: RunModel, source: RunModel | None) -> GivenCheckpoint:
    """Describe a checkpoint by the headers of its files and of its baseline's files."""
    index = _index_of(checkpoint)
    baseline = _index_of(source)
    quantization = find_quantization(index.root, index.config) if index else None
    values = quantization.values if quantization else {}
    return GivenCheckpoint(
        name=portable(checkpoint.name),
        schemes=stored_schemes(index.root) if index else (),
        format=str(values.get("format") or values.get("quant_method") or ""),
        num_bytes=index.num_bytes if index else None,
        source_bytes=baseline.num_bytes if baseline else None,
        parameters=baseline.num_parameters if baseline else None,
    )


def _index_of(model: RunModel | None) -> SourceIndex | None:
    """Read the headers of a model. Returns None if its files are not on this machine."""
    if model is None or model.checkpoint is None:
        return None
    return read_index(model.checkpoint)


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _call(seconds: Mapping[str, float]) -> Call:
    """Describe this call. The command line is without the path of the current folder."""
    command = shlex.join(["vexport", *map(portable, sys.argv[1:])])
    return Call(vexport=__version__, created=now(), command=command, seconds=seconds)


def source_name(source: SourceRef, root: Path) -> str:
    """Return a model's id on the hub if it is known, otherwise the name of its folder.

    `source` is the scenario's name for the model. `root` is the model's folder on this machine.
    """
    for path in (str(source), root.as_posix()):
        if cached := _CACHED.search(path):
            return f"{cached[1]}/{cached[2]}"
    if isinstance(source, HubName):
        return source.id
    parts = [part for part in root.resolve().parts if part != root.anchor]
    named = [part for part in parts if part.lower() not in _ROLES]
    return (named or parts or [str(source)])[-1]


def size_by_kind(source: SourceIndex, written: SourceIndex) -> tuple[KindSize, ...]:
    """Return the bytes of each kind of tensor in the source and in the output.

    The kinds that are largest in the source come first. Every tensor belongs to a kind, so no bytes
    of the source or the output are missing.
    """
    before, after = Counter[str](), Counter[str]()
    for index, sizes_by_kind in ((source, before), (written, after)):
        for name, tensor in index.tensors.items():
            sizes_by_kind[tensor_kind(name)] += tensor.num_bytes
    kinds = sorted(before | after, key=lambda kind: (-before[kind], kind))
    return tuple(
        KindSize(kind=kind, source_bytes=before[kind], output_bytes=after[kind]) for kind in kinds
    )


def tensor_kind(name: str) -> str:
    """Return the part of a block to which a tensor belongs (`self_attn`, `mlp`), or `norm`.

    Outside the blocks it is the name of the tensor's module.
    `model.layers.3.mlp.down_proj.weight_scale` is `mlp`, `model.embed_tokens.weight` is
    `embed_tokens`.
    """
    *modules, last = name.split(".")
    numbers = [index for index, part in enumerate(modules) if part.isdecimal()]
    inner = modules[numbers[0] + 1 :] if numbers else modules[-1:]
    kind = inner[0] if inner else last
    return "norm" if "norm" in kind else kind
