"""Run a scenario: make its checkpoint, and judge it. Run several schemes of a scenario."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from vexport.calibration.data import require_rows
from vexport.checkpoint.index import folder_digest, require_weights_found
from vexport.checkpoint.source import require_source
from vexport.checks.ignoring import require_ignorable
from vexport.engine.arguments import require_arguments
from vexport.engine.session import require_vllm
from vexport.errors import EnvironmentFault, VexportError
from vexport.errors.extras import attempt_all
from vexport.files import write_text
from vexport.formats.schemes import KEEP
from vexport.inference.endpoint.server import require_address
from vexport.inference.options import BASELINE, CANDIDATE, EngineOptions
from vexport.judge.task_settings import check_tasks, download_tasks
from vexport.names import Folder, Server
from vexport.outputs.manifest import record
from vexport.outputs.replaceable import NamedPath, require_separate
from vexport.plan.source import with_default_text
from vexport.records import ComparedRun
from vexport.reports.run_record import Report
from vexport.run.comparison import compared_run, mark_smallest
from vexport.run.directory import (
    CHECKPOINT,
    KIND,
    RUN_DIR,
    SCENARIO,
    Digests,
    RunDirectory,
    opened,
    portable,
)
from vexport.run.run import DEFAULT_ATTRIBUTION, AttributionSettings, Run
from vexport.run.side import Preparation, Side, prepare
from vexport.run.stages.concluding import STAGES, report
from vexport.run.stages.made import made_checkpoint
from vexport.run.stages.making import MAKING, Maker, checkpoint_inputs, plan_candidates
from vexport.run.stages.serving import SESSION, load_baseline, serve_baseline
from vexport.run.stages.variants import require_known_arguments
from vexport.scenario import Scenario, Variant
from vexport.scores.inputs import scenario_inputs

# Stages that depend only on the baseline, and not on the candidate.
BASELINE_STAGES = (serve_baseline.name, load_baseline.name)
# Folders of both sides' responses, below the run directory.
_SIDE_FOLDERS = {BASELINE: f"eval/{BASELINE}", CANDIDATE: f"eval/{CANDIDATE}"}


def run_scenario(
    scenario: Scenario,
    folder: Path,
    options: EngineOptions,
    *,
    overwrite: bool,
    file: Path | None = None,
    baseline_of: Path | None = None,
    attribution_settings: AttributionSettings = DEFAULT_ATTRIBUTION,
) -> Report:
    """Do every unfinished stage of a scenario and write the report.

    `baseline_of` is a finished run directory. The baseline's results are copied from it, unless
    this run already has them. Raises InputError for an unusable source, rule, calibration or task,
    and if `folder` overlaps an input or the scenario's `file`. Raises EnvironmentFault if vLLM is
    missing or dies. If the checkpoint fails, the report has the outcome FAIL.
    """
    require_separate([NamedPath(label=RUN_DIR, path=folder)], list(scenario_inputs(scenario, file)))
    _require_weights_found(scenario, folder)
    is_finished = (folder / _SIDE_FOLDERS[CANDIDATE] / SESSION).is_file()
    _require_usable(scenario, options, downloads=overwrite or not is_finished)
    KIND.require_own(folder)
    with opened(folder, overwrite=overwrite) as directory:
        if baseline_of is not None:
            directory.copy_stages(RunDirectory(baseline_of), BASELINE_STAGES, f"eval/{BASELINE}")
        if file is not None:
            _keep_scenario(file, folder)
        maker = Maker(scenario, directory, options)
        maker.do(plan_candidates)
        preparation = _prepare(maker)
        maker.do(*MAKING)
        run = _run_of(maker, preparation, attribution_settings)
        run.do(*STAGES)
        return run.result(report)


def _prepare(maker: Maker) -> Preparation:
    settings = maker.evaluation
    folders = {BASELINE: maker.baseline, "source": maker.index.root}
    if settings.tasks:
        for url in filter(None, (settings.endpoint, settings.baseline_endpoint)):
            require_address(url)
    return prepare(settings, folders, maker.texts)


def _run_of(maker: Maker, preparation: Preparation, attribution: AttributionSettings) -> Run:
    """Return the run of a made checkpoint.

    Unless the cause of a loss is not wanted, it is searched for even if the verdict is PASS,
    because the report shows the noise floor.
    """
    return Run(
        maker.directory,
        maker.options,
        [
            _side(maker, BASELINE, {"baseline": folder_digest(maker.baseline)}),
            _side(maker, CANDIDATE, checkpoint_inputs(maker)),
        ],
        name=maker.scenario.name,
        evaluate=maker.scenario.evaluate,
        preparation=preparation,
        made=made_checkpoint(maker),
        variants=_matrix(maker.scenario, maker.options),
        attribution=replace(attribution, wanted=attribution.wanted is not False),
        recorded=maker.recorded,
    )


def _side(maker: Maker, role: str, inputs: Digests) -> Side:
    settings, is_baseline = maker.evaluation, role == BASELINE
    checkpoint = maker.baseline if is_baseline else maker.checkpoint
    url = settings.baseline_endpoint if is_baseline else settings.endpoint
    return Side(
        role=role,
        ref=Folder.at(checkpoint) if url is None else Server(url),
        name=str(checkpoint),
        label=role,
        folder=_SIDE_FOLDERS[role],
        engine=maker.options,
        arguments=maker.options.serve.arguments(is_baseline=is_baseline),
        inputs=inputs,
        checkpoint=checkpoint,
    )


def _matrix(scenario: Scenario, options: EngineOptions) -> tuple[Variant, ...]:
    variants = scenario.variants
    return variants.matrix(options.serve, options.vllm_python) if variants is not None else ()


def _require_weights_found(scenario: Scenario, folder: Path) -> None:
    evaluate = scenario.evaluate
    baseline = (evaluate.baseline if evaluate is not None else None) or scenario.source
    models = [folder / CHECKPOINT]
    is_on_server = evaluate is not None and evaluate.baseline_endpoint is not None
    if not is_on_server and isinstance(baseline, Folder) and baseline.path.is_dir():
        models.append(baseline.path)
    attempt_all([(str(model), partial(require_weights_found, model)) for model in models])


def _require_usable(scenario: Scenario, options: EngineOptions, *, downloads: bool) -> None:
    require_ignorable(scenario.check.ignore_rules, "check.ignore_rules")
    if scenario.calibration:
        for data in scenario.calibration.sources():
            require_rows(data)
    require_vllm(options.vllm_python)
    for python in scenario.variants.vllm_python if scenario.variants else ():
        require_vllm(python)
    if scenario.evaluate is not None:
        check_tasks(scenario.evaluate, options)
    require_source(scenario.source)
    require_arguments([options.serve], options.vllm_python)
    if matrix := _matrix(scenario, options):
        require_known_arguments(matrix)
    if scenario.evaluate is not None and downloads:
        download_tasks(scenario.evaluate, options)


def _keep_scenario(file: Path, folder: Path) -> None:
    record(folder / SCENARIO)
    note = (
        f"# A copy of {portable(str(file))}; its paths are relative to the folder of the original."
    )
    write_text(folder / SCENARIO, f"{note}\n{file.read_text(encoding='utf-8')}")


def compare_folder(base: Scenario) -> Path:
    """Return the default folder for the runs of a comparison."""
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
    """Run `base` in each scheme, in a folder named after the scheme. Finished stages are skipped.

    `folder` is runs/compare-NAME by default. The runs differ only in their rules, so the baseline
    is served once and all runs share its results. `note` receives a message if the default text is
    used. Returns a row for each scheme, and the errors of engines. If a scheme cannot be made, the
    error is the reason in its row. If every run ends with an error, the first error is raised.
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
            of_baseline = made.baseline.load if made.baseline is not None else None
            is_served = of_baseline is not None and of_baseline.engine is not None
            served = served or (run_dir if is_served else None)
    if len(problems) == len(scenarios):
        raise problems[0]
    faults = tuple(error for error in problems if isinstance(error, EnvironmentFault))
    return mark_smallest(rows), faults


def with_scheme(scenario: Scenario, scheme: str) -> Scenario:
    """Return the scenario with a single scheme instead of all schemes that its rules name.

    Layers that the rules keep stay unquantized.
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
