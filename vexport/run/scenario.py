"""A scenario from source to report in a run directory; a stage that is done is not done again."""

import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from vexport.calibration.coverage import expert_coverage
from vexport.checkpoint.card import inherited_card
from vexport.checkpoint.source import require_source
from vexport.engine.arguments import require_arguments
from vexport.engine.session import require_vllm
from vexport.files import write_text
from vexport.outputs import NamedPath, require_separate
from vexport.plan import require_accepted
from vexport.reports import render
from vexport.reports.gates import checkpoint_gate
from vexport.run.attempts import read_attempts
from vexport.run.choices import Choices
from vexport.run.directory import REPORT, SCENARIO
from vexport.run.naming import commit_of, portable, source_name
from vexport.run.pipeline import require_data
from vexport.run.promoting import attempts_with, promote, require_promotable
from vexport.run.serving import EngineOptions, require_tasks, task_files
from vexport.run.sessions import NOT_RUN, Loads, Sessions
from vexport.run.sizes import size_by_kind
from vexport.run.stages import Stages
from vexport.run.weights import Weights
from vexport.scenario import Scenario
from vexport.types import CheckReport, DryLoadReport, Outcome, Report, Verdict
from vexport.version import __version__

# The page comes last: it links to what is there.
REPORT_FILES = {"report.md": "markdown", "junit.xml": "junit", "model-card.md": "card", "report.html": "html"}


def run_scenario(
    scenario: Scenario,
    folder: Path,
    options: EngineOptions,
    *,
    overwrite: bool,
    until_pass: bool = False,
    file: Path | None = None,
) -> Report:
    """Do every stage of a scenario that is not done yet and write the report.

    With `until_pass` the groups that lose most get more bits after a verdict of FAIL, round by round, until
    it is another or the rounds are used up. Raises InputError for an unusable source, rule, calibration or
    task, and where `folder` overlaps one of them or the scenario's `file`; EnvironmentFault where vLLM is
    missing or dies. A checkpoint that fails is a report with outcome FAIL.
    """
    require_separate([NamedPath(label="--run-dir", path=folder)], list(_inputs(scenario, file)))
    if until_pass:
        require_promotable(scenario)
    if scenario.calibration:
        require_data(scenario.calibration.data)
    require_vllm(options.vllm_python)
    if scenario.evaluate is not None:
        require_tasks(scenario.evaluate, options)
    require_source(scenario.source)
    require_arguments([options.serve], options.vllm_python)
    stages = Stages(scenario, folder, options)
    stages.directory.begin(overwrite=overwrite)
    if file is not None:
        _keep_scenario(file, folder)
    choices = Choices(stages)
    report = _written(_report(stages, choices), folder)
    while until_pass and promote(report, choices):
        report = _written(_report(stages, choices), folder)
    return report


def _inputs(scenario: Scenario, file: Path | None) -> Iterator[NamedPath]:
    """What a run reads; a hub id is no path that exists."""
    if file is not None:
        yield NamedPath(label="SCENARIO", path=file)
    yield NamedPath(label="source", path=Path(scenario.source).expanduser())
    if scenario.calibration:
        yield NamedPath(label="calibration.data", path=scenario.calibration.data)
    if scenario.evaluate:
        yield from task_files(scenario.evaluate, "evaluate.tasks")
        if scenario.evaluate.baseline:
            yield NamedPath(label="evaluate.baseline", path=Path(scenario.evaluate.baseline).expanduser())


def _written(report: Report, folder: Path) -> Report:
    """The report, in its files too."""
    write_text(folder / REPORT, render(report, "json"))
    for name, format_ in REPORT_FILES.items():
        write_text(folder / name, render(report, format_, folder=folder))
    return report


def _keep_scenario(file: Path, folder: Path) -> None:
    """A copy of the scenario next to what it made."""
    note = f"# A copy of {portable(str(file))}; its paths are relative to the folder of the original."
    write_text(folder / SCENARIO, f"{note}\n{file.read_text(encoding='utf-8')}")


def _report(stages: Stages, choices: Choices) -> Report:
    """Everything the run found. Stages after a failed one are not run."""
    scenario = stages.scenario
    weights = Weights(stages, choices)
    sessions = Sessions(stages, weights)
    sessions.fetch_tasks()
    index, plan = weights.planned
    require_accepted(plan)
    _ = sessions.asked  # InputError before any work where the models cannot be asked alike
    checked = weights.checked
    dry = sessions.dry_load if checked.ok else None
    loadable = checked.ok and (dry is None or dry.ok)
    loads = sessions.loads if loadable else Loads(baseline=NOT_RUN, candidate=NOT_RUN)
    verdict = sessions.verdict if loads.candidate.ok and scenario.evaluate else None
    outcome, reason = conclude(checked, dry, loads, verdict)
    calibration = weights.calibration
    return Report(
        name=scenario.name,
        vexport=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["vexport", *map(portable, sys.argv[1:])]),
        source=portable(scenario.source),
        source_name=source_name(scenario.source, index.root),
        source_revision=commit_of(index.root),
        source_card=inherited_card(index.root),
        baseline=portable(str(sessions.baseline)),
        outcome=outcome,
        reason=reason,
        plan=plan,
        sizes=size_by_kind(index, weights.written),
        layers=weights.layers,
        calibration_rows=len(calibration.rows) if calibration else 0,
        calibration_digest=calibration.digest if calibration else None,
        experts=expert_coverage(calibration) if calibration else (),
        check=checked,
        dry_load=dry,
        baseline_load=loads.baseline,
        load=loads.candidate,
        verdict=verdict,
        drift=sessions.drift if loadable else None,
        attribution=sessions.attribution(outcome) if loadable else None,
        sensitivity=choices.known_sensitivity,
        mixed=choices.mixed,
        attempts=attempts_with(choices, plan, outcome, reason),
        seconds=_seconds(stages),
    )


def _seconds(stages: Stages) -> dict[str, float]:
    """How long each stage took, and all that failed rounds had for themselves."""
    failed = read_attempts(stages.folder).seconds
    return stages.directory.seconds | ({"failed rounds": failed} if failed else {})


def conclude(
    checked: CheckReport, dry: DryLoadReport | None, loads: Loads, verdict: Verdict | None
) -> tuple[Outcome, str]:
    """The run's outcome and the sentence that justifies it: the first stage that failed decides."""
    for stage, report in (("check", checked), ("dry load", dry), ("load", loads.candidate)):
        if report is not None and not report.ok:
            return "FAIL", f"{stage}: {checkpoint_gate(stage, report).message}"
    if verdict is None:
        return (
            "PASS",
            "check and load found no error; accuracy was not evaluated (no `evaluate` in the scenario)",
        )
    return verdict.outcome, verdict.reason
