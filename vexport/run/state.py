"""A run under way: what is asked for, and what its stages have left for each other."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar, cast

from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checkpoint.source import resolve_source
from vexport.files import from_json, to_json, write_text
from vexport.plan.build import Settings as PlanSettings
from vexport.plan.source import settings_of, source_index
from vexport.run.directory import CHECKPOINT, RunDirectory
from vexport.run.judging import Explaining
from vexport.run.serving import EngineOptions, Served
from vexport.scenario import Scenario
from vexport.sensitivity.layer_groups import LayerGroup, find_layer_groups
from vexport.types import (
    Attribution,
    Calibration,
    CheckReport,
    Drift,
    DryLoadReport,
    LmEvalSettings,
    LoadReport,
    MixedScheme,
    Outcome,
    Plan,
    Report,
    Sensitivity,
    Verdict,
)

EXPLAINING = Explaining()
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Output(Generic[T_co]):
    """A result of a stage: a value of one type, and the file of the run directory that holds it as JSON.

    What has no file is worked out at every call, since that takes no time.
    """

    name: str
    type: type[T_co]
    file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The outcome and the sentence that justifies it."""

    outcome: Outcome
    reason: str


QUESTIONS = Output("lm-eval settings", LmEvalSettings)
CANDIDATES = Output("plan of all candidates", Plan)
CALIBRATION = Output("calibration", Calibration, "calibration/statistics.json")
SENSITIVITY = Output("sensitivity", Sensitivity, "sensitivity.json")
MIXED = Output("mixed scheme", MixedScheme, "mixed.json")
PLAN = Output("plan", Plan, "plan.json")
WRITTEN = Output("checkpoint", SourceIndex, CHECKPOINT)
CHECKED = Output("check", CheckReport, "check.json")
DRY_LOADED = Output("dry load", DryLoadReport, "dry-load.json")
SERVED_BASELINE = Output("baseline session", Served, "eval/baseline/session.json")
SERVED_CANDIDATE = Output("candidate session", Served, "eval/candidate/session.json")
LOADED_BASELINE = Output("baseline load", LoadReport, "eval/baseline/load.json")
LOADED = Output("load", LoadReport, "load.json")
DRIFT = Output("drift", Drift)
VERDICT = Output("verdict", Verdict)
CONCLUSION = Output("conclusion", Conclusion)
ATTRIBUTION = Output("attribution", Attribution)
REPORT = Output("report", Report)


class Run:
    """A scenario in its run directory. A stage reads what it declares, and nothing else."""

    def __init__(
        self, scenario: Scenario, folder: Path, options: EngineOptions, explaining: Explaining = EXPLAINING
    ) -> None:
        self.scenario = scenario
        self.folder = folder
        self.options = options
        self.explaining = explaining
        self.directory = RunDirectory(folder)
        self.readable: Collection[Output[object]] | None = None
        self._values: dict[str, object] = {}

    @property
    def checkpoint(self) -> Path:
        """The folder of the quantized checkpoint."""
        return self.folder / CHECKPOINT

    @property
    def planning(self) -> PlanSettings:
        """The settings of the plan besides the rules."""
        return settings_of(self.scenario)

    @cached_property
    def index(self) -> SourceIndex:
        """The source's headers."""
        return source_index(self.scenario.source, self.scenario.rules, self.options.on_progress)

    @cached_property
    def units(self) -> tuple[LayerGroup, ...]:
        """The groups of layers that can be given a scheme of their own."""
        scenario = self.scenario
        return find_layer_groups(self.index, scenario.rules, scenario.auto, self.planning)

    @cached_property
    def baseline(self) -> Path:
        """The checkpoint to compare with."""
        settings = self.scenario.evaluate
        name = settings.baseline if settings and settings.baseline else self.scenario.source
        return resolve_source(name, self.options.on_progress)

    def get(self, output: Output[T]) -> T | None:
        """Read the result of a stage; None where it was not run or found nothing."""
        assert self.readable is None or output in self.readable, f"{output.name} is not declared as read"
        return cast("T | None", self._values.get(output.name))

    def result(self, output: Output[T]) -> T:
        """Read the result of a stage that must have been run."""
        value = self.get(output)
        assert value is not None, f"nothing has left {output.name}"
        return value

    def keep(self, output: Output[T], value: T | None) -> None:
        """Leave a value for later stages, in its file too; a checkpoint is in place already."""
        self._values[output.name] = value
        if output.file is not None and output != WRITTEN and value is not None:
            write_text(self.folder / output.file, to_json(value))

    def restore(self, output: Output[object]) -> None:
        """Leave what an earlier call has written."""
        assert output.file is not None
        path = self.folder / output.file
        self._values[output.name] = read_index(path) if output == WRITTEN else from_json(output.type, path)
