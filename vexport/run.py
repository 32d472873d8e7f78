"""A scenario from source to report in a run directory; a stage that is done is not done again."""

import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path

from vexport.calibration.coverage import expert_coverage
from vexport.calibration.data import parse_rows
from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checkpoint.source import resolve_source
from vexport.checks import check_checkpoint
from vexport.engine.session import require_vllm
from vexport.errors import InputError
from vexport.files import from_json, to_json, write_text
from vexport.pipeline import calibrate_plan, plan_scenario, will_calibrate, write_checkpoint
from vexport.plan import require_accepted
from vexport.reports import render
from vexport.roundtrip import changed_tensors, layer_errors
from vexport.rundir import Digests, RunDirectory, checkpoint_digest, path_digest, value_digest
from vexport.scenario import Scenario
from vexport.serving import (
    BASELINE,
    CANDIDATE,
    EngineOptions,
    Served,
    require_served,
    require_tasks,
    serve_model,
)
from vexport.types import (
    Calibration,
    CheckReport,
    LayerError,
    LayerErrors,
    LoadReport,
    Outcome,
    Plan,
    Report,
    Verdict,
)
from vexport.verdict import decide
from vexport.version import __version__

REPORT = "report.json"
PROMPTS = 6
NOT_RUN = LoadReport(checkpoint="", ok=False, findings=())
REPORT_FILES = {"report.html": "html", "report.md": "markdown", "junit.xml": "junit"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What vLLM made of both models."""

    baseline: LoadReport
    candidate: LoadReport


def run_scenario(scenario: Scenario, folder: Path, options: EngineOptions, *, overwrite: bool) -> Report:
    """Do every stage of a scenario that is not done yet and write the report.

    Raises InputError for an unusable source, rule, calibration or task, EnvironmentFault where vLLM is
    missing or dies. A checkpoint that fails is a report with outcome FAIL.
    """
    require_vllm(options.vllm_python)
    if scenario.evaluate is not None:
        require_tasks(scenario.evaluate, options)
    run = ScenarioRun(scenario, folder, options)
    run.directory.begin(overwrite=overwrite)
    report = run.report()
    write_text(folder / REPORT, render(report, "json"))
    for name, format_ in REPORT_FILES.items():
        write_text(folder / name, render(report, format_))
    return report


def read_report(folder: Path) -> Report:
    """The report of a finished run directory; InputError where there is none."""
    path = folder / REPORT
    if not path.is_file():
        got, fix = f"no {REPORT}", "call `vexport run` first"
        raise InputError(str(folder), got=got, need="a finished run directory", fix=fix)
    return from_json(Report, path)


class ScenarioRun:
    """The stages of one scenario; each is done when first asked for, or read back if it was done before."""

    def __init__(self, scenario: Scenario, folder: Path, options: EngineOptions) -> None:
        self.scenario = scenario
        self.folder = folder
        self.options = options
        self.directory = RunDirectory(folder)
        self.checkpoint = folder / "checkpoint"

    def report(self) -> Report:
        """Everything the run found. Stages after a failed one are not run."""
        index, plan = self.planned
        require_accepted(plan)
        checked = self.checked
        loads = self.loads if checked.ok else Loads(baseline=NOT_RUN, candidate=NOT_RUN)
        verdict = self.verdict if checked.ok and loads.candidate.ok and self.scenario.evaluate else None
        outcome, reason = conclude(checked, loads, verdict)
        calibration = self.calibration
        return Report(
            name=self.scenario.name,
            vexport=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join(["vexport", *sys.argv[1:]]),
            source=self.scenario.source,
            baseline=str(self.baseline),
            outcome=outcome,
            reason=reason,
            plan=plan,
            layers=self.layers,
            calibration_rows=len(calibration.rows) if calibration else 0,
            calibration_digest=calibration.digest if calibration else None,
            experts=expert_coverage(calibration) if calibration else (),
            check=checked,
            baseline_load=loads.baseline,
            load=loads.candidate,
            verdict=verdict,
            seconds=self.directory.seconds,
        )

    @cached_property
    def planned(self) -> tuple[SourceIndex, Plan]:
        """Headers and plan; made anew each time, since it takes no time."""
        index, plan = plan_scenario(self.scenario)
        write_text(self.folder / "plan.json", to_json(plan))
        return index, plan

    @cached_property
    def calibration(self) -> Calibration | None:
        """What the samples showed; None where the plan has no use for them."""
        index, plan = self.planned
        if not will_calibrate(plan, self.scenario.calibration):
            return None
        file = self.folder / "calibration" / "statistics.json"

        def make() -> None:
            calibration = calibrate_plan(
                index,
                plan,
                self.scenario.calibration,
                on_progress=self.options.on_progress,
                trust_remote_code=self.options.trust_remote_code,
            )
            write_text(file, to_json(calibration))

        self._stage("calibrate", self._made_from, make)
        return from_json(Calibration, file)

    @cached_property
    def written(self) -> SourceIndex:
        """The quantized checkpoint."""
        index, plan = self.planned
        calibration = self.calibration

        def make() -> None:
            settings = self.scenario.calibration
            write_checkpoint(
                index,
                plan,
                calibration,
                self.checkpoint,
                overwrite=True,
                on_progress=self.options.on_progress,
                device=settings.device if settings else None,
            )

        self._stage("quantize", self._made_from, make)
        return read_index(self.checkpoint)

    @cached_property
    def checked(self) -> CheckReport:
        """Static findings, and whether what should have been copied was."""
        written = self.written
        index, plan = self.planned

        def make() -> None:
            report = check_checkpoint(str(self.checkpoint))
            findings = (*report.findings, *changed_tensors(index, written, plan))
            ok = report.ok and len(findings) == len(report.findings)
            on_layer = partial(self.options.on_progress, "read back (layers)")
            layers = LayerErrors(layers=layer_errors(index, written, plan, on_layer=on_layer))
            write_text(self.folder / "layers.json", to_json(layers))
            write_text(self.folder / "check.json", to_json(replace(report, ok=ok, findings=findings)))

        self._stage("check", self._made_from, make)
        return from_json(CheckReport, self.folder / "check.json")

    @property
    def layers(self) -> tuple[LayerError, ...]:
        """The weight error of each layer, measured by the check stage."""
        return from_json(LayerErrors, self.folder / "layers.json").layers

    @cached_property
    def loads(self) -> Loads:
        """Both models in vLLM, the candidate first: if vLLM refuses it, the baseline is not started.

        A candidate that stops early needs the baseline's answers first.
        """
        if self._early:
            require_served(BASELINE, self._served_baseline.result)
        candidate = self._served(CANDIDATE, self.checkpoint, self._made_from)
        if candidate.result.failure is not None:
            return Loads(baseline=NOT_RUN, candidate=self._judged(CANDIDATE, candidate, None))
        baseline = self._served_baseline
        require_served(BASELINE, baseline.result)
        return Loads(
            baseline=self._judged(BASELINE, baseline, baseline),
            candidate=self._judged(CANDIDATE, candidate, baseline),
        )

    @cached_property
    def _served_baseline(self) -> Served:
        return self._served(BASELINE, self.baseline, {"baseline": checkpoint_digest(self.baseline)})

    @property
    def _early(self) -> bool:
        return self.scenario.evaluate is not None and self.scenario.evaluate.stopping == "early"

    @cached_property
    def verdict(self) -> Verdict:
        """The paired comparison of both models' answers."""
        settings = self.scenario.evaluate
        assert settings is not None
        folder = self.folder / "eval"
        return decide(
            folder / BASELINE,
            folder / CANDIDATE,
            margin=settings.margin,
            alpha=settings.alpha,
            gate=settings.gate,
            early=self._early,
        )

    @cached_property
    def baseline(self) -> Path:
        """The checkpoint to compare with."""
        settings = self.scenario.evaluate
        name = settings.baseline if settings and settings.baseline else self.scenario.source
        return resolve_source(name)

    def _served(self, role: str, model: Path, digests: Digests) -> Served:
        folder = self.folder / "eval" / role

        def make() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            served = serve_model(
                role,
                model,
                folder,
                self.options,
                texts=self._texts,
                settings=self.scenario.evaluate,
                baseline=self.folder / "eval" / BASELINE if role == CANDIDATE else None,
                repeat=role == BASELINE,
            )
            write_text(folder / "session.json", to_json(served))

        self._stage(f"serve {role}", {**digests, **self._served_with}, make)
        return from_json(Served, folder / "session.json")

    def _judged(self, role: str, served: Served, baseline: Served | None) -> LoadReport:
        """The report on a session; its continuations are judged against the baseline's."""
        file = self.folder / ("load.json" if role == CANDIDATE else f"eval/{role}/load.json")

        def make() -> None:
            self.options.on_progress(f"{role}: reference", 0, 1)
            write_text(file, to_json(served.report(baseline)))
            self.options.on_progress(f"{role}: reference", 1, 1)

        others = value_digest(baseline.result.canaries) if baseline else "none"
        inputs = {"session": value_digest(served.result), "baseline session": others}
        self._stage("load" if role == CANDIDATE else f"load {role}", inputs, make)
        return from_json(LoadReport, file)

    def _stage(self, name: str, inputs: Digests, make: Callable[[], None]) -> None:
        if self.directory.is_done(name, inputs):
            return
        start = time.monotonic()
        make()
        self.directory.finish(name, inputs, time.monotonic() - start)

    @cached_property
    def _made_from(self) -> Digests:
        """What the checkpoint depends on."""
        settings = self.scenario.calibration
        digests = {
            "vexport": __version__,
            "source": checkpoint_digest(self.planned[0].root),
            "rules": value_digest([rule.model_dump() for rule in self.scenario.rules]),
            "calibration": value_digest(settings.model_dump(mode="json") if settings else None),
        }
        return digests | ({"calibration data": path_digest(settings.data)} if settings else {})

    @cached_property
    def _served_with(self) -> Digests:
        """What a session depends on besides the model."""
        settings = self.scenario.evaluate
        decides = None if self._early else {"margin", "alpha", "gate"}
        sides = settings.model_dump(mode="json", exclude=decides) if settings else None
        files = (
            [path_digest(Path(task)) for task in settings.tasks if Path(task).is_file()] if settings else []
        )
        return {
            "evaluation": value_digest([sides, *files]),
            "serve settings": value_digest(self.scenario.serve.model_dump(mode="json")),
            "prompts": value_digest(list(self._texts)),
        }

    @cached_property
    def _texts(self) -> tuple[str, ...]:
        """The first halves of calibration texts as prompts: the model knows their kind and can go on."""
        settings = self.scenario.calibration
        rows = parse_rows(settings.data).values() if settings else ()
        texts = [text for row in rows if isinstance(text := row.get("text"), str)][:PROMPTS]
        return tuple(text[: text.rfind(" ", 0, len(text) // 2 + 1)] for text in texts if " " in text)


def conclude(checked: CheckReport, loads: Loads, verdict: Verdict | None) -> tuple[Outcome, str]:
    """The run's outcome and the sentence that justifies it: the first stage that failed decides."""
    for stage, report in (("check", checked), ("load", loads.candidate)):
        if not report.ok:
            first = next(finding for finding in report.findings if finding.severity == "error")
            return "FAIL", f"{stage}: {first}"
    if verdict is None:
        return "PASS", "check and load found no error; the scenario asks for no evaluation"
    return verdict.outcome, verdict.reason
