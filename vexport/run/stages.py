"""The stages of a run in their order: of a scenario, of several schemes, and of given checkpoints.

The last stages are here: the outcome, the cause of a loss, and the report.
"""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vexport.checkpoint.card import inherited_card
from vexport.checkpoint.hub import HubName, pinned_name
from vexport.checkpoint.index import SourceIndex, find_quantization, read_index
from vexport.checkpoint.source import require_data, require_source
from vexport.engine.arguments import require_arguments
from vexport.engine.session import require_vllm
from vexport.errors import EnvironmentFault, VexportError
from vexport.evaluation.inputs import scenario_inputs
from vexport.files import from_json, user_path, write_text
from vexport.formats.schemes import KEEP
from vexport.outputs.manifest import record
from vexport.outputs.replaceable import NamedPath, require_separate, written_alone
from vexport.plan.source import with_default_text
from vexport.records import (
    Attribution,
    CheckReport,
    ComparedRun,
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
from vexport.reports.report import Report
from vexport.run import making, proving
from vexport.run.comparison import compared_run, mark_smallest
from vexport.run.directory import (
    LAYERS,
    REPORT_FILE,
    SCENARIO,
    Run,
    RunDirectory,
    Stage,
    logged_to,
    portable,
    require_run_folder,
    rounding_of,
)
from vexport.run.given import BASELINE, Given, RunModel
from vexport.run.judging import cause_of
from vexport.run.options import EXPLAINING, EngineOptions, Explaining
from vexport.run.serving import require_tasks
from vexport.scenario import Scenario
from vexport.version import __version__

NOT_RUN = LoadReport(checkpoint="", ok=False, findings=())
# The forms of the report, and their files. The page comes last: it links to what is there.
RENDERED = {"report.md": "markdown", "junit.xml": "junit", "report.html": "html"}
MODEL_CARD = "model-card.md"
# The hub's cache: models--ORG--NAME/snapshots/REVISION (huggingface_hub.constants,
# REPO_ID_SEPARATOR).
_CACHED = re.compile(r"(?:^|/)models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")
# Folder names that only state a role; the parent folder's name is used instead.
_ROLES = {"model", "checkpoint", "source", "snapshot", "hf", "weights", "final", "main", "output"}


class Conclusion(NamedTuple):
    """The outcome and the sentence that justifies it."""

    outcome: Outcome
    reason: str


def _has_outcome(run: Run) -> bool:
    """Return False if answers of a given checkpoint are compared with nothing."""
    given = run.given
    return given is None or given.evaluate is None or given.is_compared


@partial(Stage, "conclude", Conclusion, when=_has_outcome)
def conclude(run: Run) -> Conclusion:
    """Decide the outcome from all stages."""
    if run.given is not None:
        return _concluded_given(run.get(proving.judge), run.get(proving.load_candidate))
    checked, dry, verdict = (
        run.result(making.check),
        run.get(proving.dry_load),
        run.get(proving.judge),
    )
    return concluded(checked, dry, run.get(proving.load_candidate) or NOT_RUN, verdict)


def _concluded_given(verdict: Verdict | None, loaded: LoadReport | None) -> Conclusion:
    """Decide by the verdict, or by the load if that is all that was asked for."""
    if verdict is not None:
        return Conclusion(verdict.outcome, verdict.reason)
    assert loaded is not None
    if not loaded.ok:
        return Conclusion("FAIL", f"load: {checkpoint_gate('load', loaded).message}")
    return Conclusion("PASS", "load found no error; accuracy was not evaluated")


def concluded(
    checked: CheckReport, dry: DryLoadReport | None, loaded: LoadReport, verdict: Verdict | None
) -> Conclusion:
    """Decide the outcome of a checkpoint that the run made: the first stage that failed decides."""
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
    """Return whether to look for the cause of a loss.

    A scenario's run looks after a pass too: its report shows the noise floor.
    """
    if proving.sessions_here(run) is None:
        return False
    if run.given is None:
        return run.explaining.wanted is not False
    conclusion = run.get(conclude)
    return conclusion is not None and run.explaining.is_due(conclusion.outcome)


@partial(Stage, "attribute", Attribution, when=_wants_cause)
def attribute(run: Run) -> Attribution | None:
    """Find the cause of a loss."""
    sessions = proving.sessions_here(run)
    assert sessions is not None
    outcome = run.result(conclude).outcome
    return cause_of(*sessions, run.evaluation, outcome, run.options, run.explaining.seconds)


@partial(Stage, "report", Report, writes=(REPORT_FILE, *RENDERED), when=_has_outcome)
def report(run: Run) -> Report:
    """Write the report of the run in all its forms."""
    found = report_on(run)
    write_text(run.folder / REPORT_FILE, render(found, "json"))
    if run.given is None:
        record(run.folder / MODEL_CARD)
        write_text(run.folder / MODEL_CARD, render(found, "card"))
    for name, format_ in RENDERED.items():
        write_text(run.folder / name, render(found, format_, folder=run.folder))
    return found


def report_on(run: Run) -> Report:
    """Collect everything that the run has found so far."""
    return _made_report(run) if run.given is None else _given_report(run, run.given)


def _made_report(run: Run) -> Report:
    """Collect the results of a run that made its checkpoint."""
    scenario, root = run.scenario, run.index.root
    conclusion, calibration = run.result(conclude), run.get(making.calibrate)
    rounding, pinned = rounding_of(run.folder), pinned_name(root)
    if calibration is not None and rounding is not None:
        calibration = rounding.completed(calibration)
    return Report(
        name=scenario.name,
        vexport=__version__,
        created=_now(),
        command=_command(),
        source=portable(scenario.source),
        source_name=source_name(scenario.source, root),
        source_revision=pinned.partition("@")[2] if pinned else None,
        source_card=inherited_card(root),
        baseline=portable(str(run.baseline)),
        outcome=conclusion.outcome,
        reason=conclusion.reason,
        plan=run.result(making.make_plan),
        sizes=size_by_kind(run.index, run.result(making.quantize)),
        layers=from_json(LayerErrors, run.folder / LAYERS).layers,
        calibration_rows=len(calibration.rows) if calibration else 0,
        calibration_data=portable(calibration.data) if calibration else "",
        calibration_digest=calibration.digest if calibration else None,
        experts=expert_coverage(calibration) if calibration else (),
        rounding=rounding,
        check=run.result(making.check),
        dry_load=run.get(proving.dry_load),
        baseline_load=run.get(proving.load_baseline) or NOT_RUN,
        load=run.get(proving.load_candidate) or NOT_RUN,
        verdict=run.get(proving.judge),
        drift=run.get(proving.measure_drift),
        attribution=run.get(attribute),
        sensitivity=run.get(making.measure_sensitivity),
        mixed=run.get(making.choose),
        seconds=run.seconds,
    )


def _given_report(run: Run, given: Given) -> Report:
    """Collect the results of a run whose checkpoint was given."""
    conclusion = run.result(conclude)
    baseline = given.against if given.baseline is None else given.baseline.name
    load = run.get(proving.load_candidate)
    return Report(
        name=given.name,
        vexport=__version__,
        created=_now(),
        command=_command(),
        source=None,
        baseline=None if baseline is None else portable(str(baseline)),
        outcome=conclusion.outcome,
        reason=conclusion.reason,
        plan=None,
        given=_described(given),
        layers=(),
        calibration_rows=0,
        calibration_digest=None,
        check=None,
        baseline_load=proving.load_of(run, proving.serve_baseline),
        load=load or proving.load_of(run, proving.serve_candidate),
        verdict=run.get(proving.judge),
        drift=run.get(proving.measure_drift),
        attribution=run.get(attribute) if run.is_reached(attribute) else None,
        seconds=run.seconds,
    )


def _described(given: Given) -> GivenCheckpoint:
    """Describe a given checkpoint by the headers of its files and of its baseline's."""
    index, baseline = _index_of(given.candidate), _index_of(given.baseline)
    quantization = find_quantization(index.root, index.config) if index else None
    values = quantization.values if quantization else {}
    return GivenCheckpoint(
        name=portable(given.candidate.name),
        format=str(values.get("format") or values.get("quant_method") or ""),
        num_bytes=index.num_bytes if index else None,
        source_bytes=baseline.num_bytes if baseline else None,
        parameters=baseline.num_parameters if baseline else None,
    )


def _index_of(model: RunModel | None) -> SourceIndex | None:
    """Read the headers of a model, None if its files are not on this machine."""
    if model is None or model.checkpoint is None:
        return None
    return read_index(model.checkpoint)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _command() -> str:
    """Return the command line of this call, without the path of the current folder."""
    return shlex.join(["vexport", *map(portable, sys.argv[1:])])


STAGES: tuple[Stage[object], ...] = (
    making.plan_candidates,
    proving.settle_questions,
    making.calibrate,
    making.measure_sensitivity,
    making.choose,
    making.make_plan,
    making.quantize,
    making.check,
    proving.dry_load,
    proving.serve_baseline,
    proving.serve_candidate,
    proving.load_baseline,
    proving.load_candidate,
    proving.measure_drift,
    proving.judge,
    conclude,
    attribute,
    report,
)
# The stages up to the outcome, which comes before its cause is looked for.
JUDGING = STAGES[: STAGES.index(attribute)]
# Stages of the baseline alone, whatever it is compared with.
BASELINE_STAGES = (proving.serve_baseline.name, proving.load_baseline.name)


def run_scenario(
    scenario: Scenario,
    folder: Path,
    options: EngineOptions,
    *,
    overwrite: bool,
    file: Path | None = None,
    baseline_of: Path | None = None,
    explaining: Explaining = EXPLAINING,
) -> Report:
    """Do every stage of a scenario that is not done yet and write the report.

    With `baseline_of`, a finished run directory, its baseline's results are taken where this run
    has none. Raises InputError for an unusable source, rule, calibration or task, and where
    `folder` overlaps one of them or the scenario's `file`; EnvironmentFault where vLLM is missing
    or dies. A checkpoint that fails is a report with outcome FAIL.
    """
    require_separate(
        [NamedPath(label="--run-dir", path=folder)], list(scenario_inputs(scenario, file))
    )
    _require_usable(scenario, options)
    require_run_folder(folder)
    with written_alone(folder, "--run-dir"):
        run = Run(scenario, folder, options, explaining)
        run.directory.begin(overwrite=overwrite)
        with logged_to(folder):
            if baseline_of is not None:
                run.directory.adopt(RunDirectory(baseline_of), BASELINE_STAGES, f"eval/{BASELINE}")
            if file is not None:
                _keep_scenario(file, folder)
            for stage in STAGES:
                run.do(stage)
            return run.result(report)


def _require_usable(scenario: Scenario, options: EngineOptions) -> None:
    """Raise for what would stop the run hours later, before anything is written."""
    if scenario.calibration:
        require_data(scenario.calibration.data)
    require_vllm(options.vllm_python)
    if scenario.evaluate is not None:
        require_tasks(scenario.evaluate, options)
    require_source(scenario.source)
    require_arguments([options.serve], options.vllm_python)


def _keep_scenario(file: Path, folder: Path) -> None:
    record(folder / SCENARIO)
    note = (
        f"# A copy of {portable(str(file))}; its paths are relative to the folder of the original."
    )
    write_text(folder / SCENARIO, f"{note}\n{file.read_text(encoding='utf-8')}")


def compare_folder(base: Scenario) -> Path:
    """Return the folder of the runs of a comparison, unless another folder is named."""
    return Path("runs") / f"compare-{base.name}"


def compare_schemes(
    base: Scenario,
    schemes: Sequence[str],
    folder: Path | None,
    options: EngineOptions,
    *,
    overwrite: bool,
    note: Callable[[str], None],
) -> tuple[tuple[ComparedRun, ...], tuple[VexportError, ...]]:
    """Run `base` in each scheme where that is not done yet, in a folder named by the scheme.

    `folder` is runs/compare-NAME unless given. The runs differ in their rules alone, so the first
    baseline that is served is that of all; `note` announces default text. Returns a row for each,
    also for a scheme that cannot be made, and the faults of engines. Where none has a report, the
    first problem is raised.
    """
    rows: list[ComparedRun] = []
    problems: list[VexportError] = []
    served: Path | None = None
    folder = folder or compare_folder(base)
    scenarios = with_default_text([with_scheme(base, scheme) for scheme in schemes], note)
    for scheme, scenario in zip(schemes, scenarios, strict=True):
        options.on_progress(f"{scheme} (schemes)", len(rows), len(scenarios))
        run_dir = folder / scheme
        try:
            made = run_scenario(scenario, run_dir, options, overwrite=overwrite, baseline_of=served)
        except VexportError as error:
            problems.append(error)
            rows.append(
                ComparedRun(
                    name=scenario.name, folder=str(run_dir), schemes=scheme, reason=str(error)
                )
            )
        else:
            rows.append(compared_run(made, str(run_dir)))
            is_served = made.baseline_load is not None and made.baseline_load.engine is not None
            served = served or (run_dir if is_served else None)
    if len(problems) == len(scenarios):
        raise problems[0]
    faults = tuple(error for error in problems if isinstance(error, EnvironmentFault))
    return mark_smallest(rows), faults


def with_scheme(scenario: Scenario, scheme: str) -> Scenario:
    """The scenario with one scheme in the place of all that its rules name; what they keep is
    kept.
    """
    observers: dict[str, object] = {
        "observer": None,
        "observer_kwargs": {},
        "input_observer": None,
        "input_observer_kwargs": {},
    }
    rules = tuple(
        rule if rule.scheme == KEEP else rule.model_copy(update={"scheme": scheme, **observers})
        for rule in scenario.rules
    )
    return scenario.model_copy(
        update={"rules": rules, "name": f"{scenario.name}-{scheme}", "auto": None}
    )


def source_name(source: str, root: Path) -> str:
    """Return a model's id on the hub where that is known, else the name of its folder.

    `source` is the name that the scenario gives, `root` the folder that it became.
    """
    for path in (source, root.as_posix()):
        if cached := _CACHED.search(path):
            return f"{cached[1]}/{cached[2]}"
    if not user_path(source).exists() and (model := HubName.parse(source)):
        return model.id
    parts = [part for part in root.resolve().parts if part != root.anchor]
    named = [part for part in parts if part.lower() not in _ROLES]
    return (named or parts or [source])[-1]


def size_by_kind(source: SourceIndex, written: SourceIndex) -> tuple[KindSize, ...]:
    """The largest of the source first; all kinds together have all bytes of both."""
    before, after = Counter[str](), Counter[str]()
    for index, sizes_by_kind in ((source, before), (written, after)):
        for name, tensor in index.tensors.items():
            sizes_by_kind[tensor_kind(name)] += tensor.num_bytes
    kinds = sorted(before | after, key=lambda kind: (-before[kind], kind))
    return tuple(
        KindSize(kind=kind, source_bytes=before[kind], output_bytes=after[kind]) for kind in kinds
    )


def tensor_kind(name: str) -> str:
    """The part of a block that a tensor belongs to (`self_attn`, `mlp`), `norm`, or what stands
    alone.

    `model.layers.3.mlp.down_proj.weight_scale` is `mlp`, `model.embed_tokens.weight` is
    `embed_tokens`.
    """
    *modules, last = name.split(".")
    numbers = [index for index, part in enumerate(modules) if part.isdecimal()]
    inner = modules[numbers[0] + 1 :] if numbers else modules[-1:]
    kind = inner[0] if inner else last
    return "norm" if "norm" in kind else kind
