"""`vexport compare`: a run for each scheme in one folder, the baseline served once, and one table of all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from vexport.engine.session import engines_share_imports
from vexport.errors import EnvironmentFault, VexportError
from vexport.evaluation.pareto import decide, marked
from vexport.files import write_text
from vexport.formats.schemes import KEEP
from vexport.outputs import FolderKind, written_alone
from vexport.plan.recommend import Target
from vexport.plan.source import recommendation_of
from vexport.reports import render_comparison
from vexport.run.directory import KIND as RUN
from vexport.run.naming import portable
from vexport.run.scenario import run_scenario
from vexport.run.serving import EngineOptions
from vexport.scenario import Scenario
from vexport.types import (
    Candidate,
    ComparedScheme,
    Recommendation,
    Report,
    SchemeComparison,
    SpeedKind,
    SpeedPoint,
    TaskVerdict,
)
from vexport.version import __version__

SCHEMES = "schemes"
PAGES = {"compare.json": "json", "compare.md": "markdown", "compare.html": "html"}
KIND = FolderKind(
    name="a folder of `vexport compare`",
    mark=".vexport-compare",
    text="A comparison of vexport. `vexport compare --overwrite` replaces everything in it.\n",
    entries=frozenset((SCHEMES, *PAGES)),
)
UNQUANTIZED = "unquantized"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The comparison, and what kept engines from telling: schemes that a second call tries again."""

    comparison: SchemeComparison
    faults: tuple[VexportError, ...]


@engines_share_imports()
def compare_schemes(
    name: str,
    scenarios: Mapping[str, Scenario],
    folder: Path,
    options: EngineOptions,
    target: Target | None,
    *,
    overwrite: bool,
) -> Compared:
    """Run each scenario that is not done yet, and compare them under a name.

    The scenarios are named by their schemes; they differ in their rules alone. A scheme that cannot be made,
    or whose engine dies, is a row that says so. Raises what the first one raised where none has a report, and
    InputError for a folder of something else.
    """
    KIND.require_own(folder)
    with written_alone(folder, "--run-dir"):
        _begin(folder, overwrite=overwrite)
        return _compared(name, scenarios, folder, options, target)


def _compared(
    name: str, scenarios: Mapping[str, Scenario], folder: Path, options: EngineOptions, target: Target | None
) -> Compared:
    first = next(iter(scenarios.values()))
    found = recommendation_of(first.source, target, options.on_progress, tuple(scenarios)) if target else None
    reports: dict[str, Report] = {}
    problems: dict[str, VexportError] = {}
    for scheme, scenario in scenarios.items():
        options.on_progress(f"{scheme} (schemes)", len(reports) + len(problems), len(scenarios))
        served = next((name for name, report in reports.items() if report.baseline_load.engine), None)
        try:
            reports[scheme] = run_scenario(
                scenario,
                folder / SCHEMES / scheme,
                options,
                overwrite=False,
                baseline_of=folder / SCHEMES / served if served else None,
            )
        except VexportError as error:
            problems[scheme] = error
    if not reports:
        raise next(iter(problems.values()))
    comparison = _comparison(name, scenarios, reports, problems, found)
    for page, format_ in PAGES.items():
        write_text(folder / page, render_comparison(comparison, format_))
    faults = tuple(error for error in problems.values() if isinstance(error, EnvironmentFault))
    return Compared(comparison=comparison, faults=faults)


def _begin(folder: Path, *, overwrite: bool) -> None:
    if overwrite:
        KIND.require_replaceable(folder, overwrite=True)
        for run in sorted((folder / SCHEMES).glob("*")):
            RUN.require_replaceable(run, overwrite=True)
        KIND.begin(folder)
    write_text(folder / KIND.mark, KIND.text)


def with_scheme(scenario: Scenario, scheme: str) -> Scenario:
    """The scenario with one scheme in the place of all that its rules name; what they keep is kept."""
    rules = tuple(
        rule if rule.scheme == KEEP else rule.model_copy(update={"scheme": scheme, "observer": None})
        for rule in scenario.rules
    )
    name = f"{scenario.name}-{scheme}"
    return scenario.model_copy(update={"rules": rules, "name": name, "auto": None})


def _comparison(
    name: str,
    scenarios: Mapping[str, Scenario],
    reports: Mapping[str, Report],
    problems: Mapping[str, VexportError],
    found: Recommendation | None,
) -> SchemeComparison:
    on_gpu = {row.scheme: row for row in found.schemes} if found else {}
    rows = [
        _row(scheme, reports[scheme], on_gpu.get(scheme))
        if scheme in reports
        else ComparedScheme(scheme=scheme, reason=str(problems[scheme]), on_gpu=on_gpu.get(scheme))
        for scheme in scenarios
    ]
    scenario, first = next(iter(scenarios.values())), next(iter(reports.values()))
    engines = [report.baseline_load.engine for report in reports.values()]
    kind = _speed_kind(rows)
    baseline = _with_rates(_baseline_row(first, found.source_row if found else None), kind)
    schemes = marked([_with_rates(row, kind) for row in rows])
    decision = decide(
        schemes, baseline, f"by the bound on {found.gpu}" if found and kind == "bound" else "measured"
    )
    return SchemeComparison(
        name=name,
        source=portable(scenario.source),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        vexport=__version__,
        device=next((engine.device for engine in engines if engine), ""),
        gpu=found.gpu if found else "",
        tp=found.tp if found else scenario.serve.ranks,
        context=found.context if found else 0,
        speed_kind=kind,
        baseline=baseline,
        schemes=schemes,
        recommended=decision.scheme,
        reasons=decision.reasons,
    )


def _baseline_row(report: Report, on_gpu: Candidate | None) -> ComparedScheme:
    plan = report.plan
    return ComparedScheme(
        scheme=UNQUANTIZED,
        num_bytes=plan.source_bytes,
        bits_per_weight=8 * plan.source_bytes / max(1, plan.parameters),
        points=_points(report, "baseline"),
        on_gpu=on_gpu,
    )


def _row(scheme: str, report: Report, on_gpu: Candidate | None) -> ComparedScheme:
    plan, worst = report.plan, _worst(report)
    return ComparedScheme(
        scheme=scheme,
        folder=f"{SCHEMES}/{scheme}",
        outcome=report.outcome,
        reason=report.reason,
        num_bytes=plan.output_bytes,
        bits_per_weight=8 * plan.output_bytes / max(1, plan.parameters),
        mean_kl=report.drift.mean_kl if report.drift else None,
        task=worst.task if worst else "",
        recovery=worst.recovery if worst else None,
        recovery_low=worst.recovery_low if worst else None,
        recovery_high=worst.recovery_high if worst else None,
        points=_points(report, "checkpoint"),
        unmeasured=next((one.unmeasured for one in report.speeds if one.role == "checkpoint"), ""),
        on_gpu=on_gpu,
    )


def _worst(report: Report) -> TaskVerdict | None:
    tasks = report.verdict.tasks if report.verdict else ()
    return min(tasks, key=lambda task: task.low, default=None)


def _points(report: Report, role: str) -> tuple[SpeedPoint, ...]:
    return tuple(point for one in report.speeds if one.role == role for point in one.points)


def _speed_kind(rows: Sequence[ComparedScheme]) -> SpeedKind:
    """Never two kinds in one comparison: measured on one device, or bounds for one GPU."""
    made = [row for row in rows if row.outcome is not None]
    if all(row.points for row in made):
        return "measured"
    if any(row.on_gpu is not None and row.on_gpu.speed is not None for row in made):
        return "bound"
    return "measured" if any(row.points for row in made) else "none"


def _with_rates(row: ComparedScheme, kind: SpeedKind) -> ComparedScheme:
    """The speeds that are compared; of a bound its upper end, which has the same order as the bound."""
    if kind == "measured":
        return replace(row, rates=tuple((point.concurrency, point.tokens_per_second) for point in row.points))
    speed = row.on_gpu.speed if row.on_gpu and kind == "bound" else None
    decode = speed.decode if speed else ()
    return replace(row, rates=tuple((one.batch, one.high) for one in decode if one.high is not None))
