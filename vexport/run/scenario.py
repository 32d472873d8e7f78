"""A scenario from source to report in a run directory; a stage that is done is not done again."""

from collections.abc import Iterator
from pathlib import Path

from vexport.checkpoint.data_name import require_data
from vexport.checkpoint.source import require_source
from vexport.engine.arguments import require_arguments
from vexport.engine.session import require_vllm
from vexport.files import write_text
from vexport.outputs import NamedPath, require_separate, written_alone
from vexport.outputs.log import logged_to
from vexport.run.directory import KIND, SCENARIO, RunDirectory
from vexport.run.judging import Explaining
from vexport.run.naming import portable
from vexport.run.serving import BASELINE, EngineOptions, require_tasks, task_files
from vexport.run.stages import finish
from vexport.run.state import EXPLAINING, Run
from vexport.scenario import Scenario
from vexport.types import Report

# What is known of the baseline, whatever is compared with it.
BASELINE_STAGES = (f"serve {BASELINE}", f"load {BASELINE}")


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
            return _finished(run, file=file, baseline_of=baseline_of)


def _finished(run: Run, *, file: Path | None, baseline_of: Path | None) -> Report:
    """The report of a run whose directory has begun."""
    if baseline_of is not None:
        run.directory.adopt(RunDirectory(baseline_of), BASELINE_STAGES, f"eval/{BASELINE}")
    if file is not None:
        _keep_scenario(file, run.folder)
    return finish(run)


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
