"""A run under way: its stages, what each reads and leaves, and the results that have been left so far."""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar, cast

from vexport.checkpoint.index import SourceIndex, read_index
from vexport.checkpoint.source import resolve_source
from vexport.files import from_json, to_json, write_text
from vexport.plan.build import PlanSettings
from vexport.plan.source import settings_of, source_index
from vexport.run.directory import CHECKPOINT, Digests, RunDirectory
from vexport.run.judging import Explaining
from vexport.run.serving import EngineOptions
from vexport.scenario import Scenario
from vexport.sensitivity.layer_groups import LayerGroup, find_layer_groups

LOG = logging.getLogger(__name__)
EXPLAINING = Explaining()
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Stage(Generic[T_co]):
    """One stage of a run, whose result `make` returns, and which sees the results of what it `reads` alone.

    `file` of the run directory holds the result as JSON, or is a checkpoint. `digest` has a digest of each
    input: a stage that was finished from the same ones is not done again, from others it is an InputError. A
    stage without `digest` takes no time and is done at every call. All of them are skipped unless `when`.
    """

    name: str
    type: type[T_co]
    make: Callable[["Run"], T_co | None]
    file: str | None = None
    _: KW_ONLY
    reads: tuple["Stage[object]", ...] = ()
    digest: Callable[["Run"], Digests] | None = None
    when: Callable[["Run"], bool] | None = None


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
        self.readable: Collection[Stage[object]] | None = None
        self._results: dict[str, object] = {}

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

    def get(self, stage: Stage[T]) -> T | None:
        """The result of a stage; None where it was not run or found nothing."""
        assert self.readable is None or stage in self.readable, f"{stage.name} is not declared as read"
        return cast("T | None", self._results.get(stage.name))

    def result(self, stage: Stage[T]) -> T:
        """The result of a stage that must have been run."""
        result = self.get(stage)
        assert result is not None, f"{stage.name} has left nothing"
        return result

    def keep(self, stage: Stage[T], result: T | None) -> None:
        """Leave a result for later stages, in its file too; a checkpoint is in place already."""
        self._results[stage.name] = result
        if stage.file is not None and stage.file != CHECKPOINT and result is not None:
            write_text(self.folder / stage.file, to_json(result))

    def do(self, stage: Stage[object]) -> None:
        """Do a stage that the run has, unless it was finished from the same inputs; InputError for others."""
        self.readable = stage.reads
        try:
            if stage.when is None or stage.when(self):
                self._do(stage)
        finally:
            self.readable = None

    def _do(self, stage: Stage[object]) -> None:
        inputs = stage.digest(self) if stage.digest else None
        if inputs is not None and self.directory.is_done(stage.name, inputs):
            LOG.debug("%s: done before", stage.name)
            assert stage.file is not None
            path = self.folder / stage.file
            is_checkpoint = stage.file == CHECKPOINT
            self._results[stage.name] = read_index(path) if is_checkpoint else from_json(stage.type, path)
            return
        start = time.monotonic()
        self.keep(stage, stage.make(self))
        seconds = time.monotonic() - start
        LOG.debug("%s: %.1f s", stage.name, seconds)
        if inputs is not None:
            made = self.checkpoint if stage.file == CHECKPOINT else None
            self.directory.finish(stage.name, inputs, seconds, made)
