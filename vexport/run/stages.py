"""A run: every stage of a scenario in its order, and the same for several schemes with one baseline."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from vexport.checkpoint.data_name import require_data
from vexport.checkpoint.source import require_source
from vexport.engine.arguments import require_arguments
from vexport.engine.session import require_vllm
from vexport.errors import EnvironmentFault, VexportError
from vexport.files import write_text
from vexport.formats.schemes import KEEP
from vexport.outputs import NamedPath, require_separate, written_alone
from vexport.outputs.log import logged_to
from vexport.records import ComparedRun, Report
from vexport.reports.run import compared_run, marked
from vexport.run import concluding, making, proving
from vexport.run.directory import KIND, SCENARIO, RunDirectory, portable
from vexport.run.judging import Explaining
from vexport.run.serving import BASELINE, EngineOptions, require_tasks, task_files
from vexport.run.state import EXPLAINING, Run, Stage
from vexport.scenario import DEFAULT_OBSERVERS, Scenario

STAGES: tuple[Stage[object], ...] = (
    making.CANDIDATES,
    proving.QUESTIONS,
    making.CALIBRATION,
    making.SENSITIVITY,
    making.MIXED,
    making.PLAN,
    making.WRITTEN,
    making.CHECKED,
    proving.DRY_LOADED,
    proving.SERVED_BASELINE,
    proving.SERVED_CANDIDATE,
    proving.LOADED_BASELINE,
    proving.LOADED,
    proving.DRIFT,
    proving.VERDICT,
    concluding.CONCLUSION,
    concluding.ATTRIBUTION,
    concluding.REPORT,
)
# What is known of the baseline, whatever is compared with it.
BASELINE_STAGES = (proving.SERVED_BASELINE.name, proving.LOADED_BASELINE.name)


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

    With `baseline_of`, a finished run directory, its baseline's
    results are taken where this run has none. Raises InputError for an unusable source, rule, calibration or
    task, and where `folder` overlaps one of them or the scenario's `file`; EnvironmentFault where vLLM is
    missing or dies. A checkpoint that fails is a report with outcome FAIL.
    """
    require_separate([NamedPath(label="--run-dir", path=folder)], list(_inputs(scenario, file)))
    _require_usable(scenario, options)
    KIND.require_own(folder)
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
            return run.result(concluding.REPORT)


def _require_usable(scenario: Scenario, options: EngineOptions) -> None:
    """Raise for what would stop the run after hours: before anything is written."""
    if scenario.calibration:
        require_data(scenario.calibration.data)
    require_vllm(options.vllm_python)
    if scenario.evaluate is not None:
        require_tasks(scenario.evaluate, options)
    require_source(scenario.source)
    require_arguments([options.serve], options.vllm_python)


def _inputs(scenario: Scenario, file: Path | None) -> Iterator[NamedPath]:
    """The paths that a run reads; a hub id is no path that exists."""
    if file is not None:
        yield NamedPath(label="SCENARIO", path=file)
    yield NamedPath(label="source", path=Path(scenario.source).expanduser())
    if scenario.calibration and scenario.calibration.path:
        yield NamedPath(label="calibration.data", path=scenario.calibration.path)
    if scenario.evaluate:
        yield from task_files(scenario.evaluate, "evaluate.tasks")
        if scenario.evaluate.baseline:
            yield NamedPath(label="evaluate.baseline", path=Path(scenario.evaluate.baseline).expanduser())


def _keep_scenario(file: Path, folder: Path) -> None:
    """A copy of the scenario next to what it made."""
    note = f"# A copy of {portable(str(file))}; its paths are relative to the folder of the original."
    write_text(folder / SCENARIO, f"{note}\n{file.read_text(encoding='utf-8')}")


def compare_schemes(
    scenarios: Mapping[str, Scenario], folder: Path, options: EngineOptions, *, overwrite: bool
) -> tuple[tuple[ComparedRun, ...], tuple[VexportError, ...]]:
    """Run each scenario that is not done yet, in a folder named by its scheme.

    They differ in their rules alone, so that the baseline of the first that served it is that of all. Returns
    a row for each, and the faults of engines, which a second call may do without. A scheme that cannot be
    made is a row that says so; where none has a report, what stopped the first is raised.
    """
    rows: list[ComparedRun] = []
    problems: list[VexportError] = []
    served: Path | None = None
    for scheme, scenario in scenarios.items():
        options.on_progress(f"{scheme} (schemes)", len(rows), len(scenarios))
        run_dir = folder / scheme
        try:
            report = run_scenario(scenario, run_dir, options, overwrite=overwrite, baseline_of=served)
        except VexportError as error:
            problems.append(error)
            rows.append(
                ComparedRun(name=scenario.name, folder=str(run_dir), schemes=scheme, reason=str(error))
            )
        else:
            rows.append(compared_run(report, str(run_dir)))
            served = served or (run_dir if report.baseline_load.engine else None)
    if len(problems) == len(scenarios):
        raise problems[0]
    faults = tuple(error for error in problems if isinstance(error, EnvironmentFault))
    return marked(rows), faults


def with_scheme(scenario: Scenario, scheme: str) -> Scenario:
    """The scenario with one scheme in the place of all that its rules name; what they keep is kept."""
    rules = tuple(
        rule if rule.scheme == KEEP else rule.model_copy(update={"scheme": scheme, **DEFAULT_OBSERVERS})
        for rule in scenario.rules
    )
    return scenario.model_copy(update={"rules": rules, "name": f"{scenario.name}-{scheme}", "auto": None})
