"""`vexport compare`: a run for each scheme in one folder, with the baseline of the first."""

from collections.abc import Mapping
from pathlib import Path

from vexport.errors import EnvironmentFault, VexportError
from vexport.formats.schemes import KEEP
from vexport.reports.comparison import compared_run, marked
from vexport.run.scenario import run_scenario
from vexport.run.serving import EngineOptions
from vexport.scenario import DEFAULT_OBSERVERS, Scenario
from vexport.types import ComparedRun


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
