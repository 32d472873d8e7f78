"""Do the stages of a run, and skip the finished ones."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from vexport.checkpoint.index import read_index
from vexport.files import from_json, to_json, write_text
from vexport.inference.options import EngineOptions
from vexport.outputs.manifest import record
from vexport.run.directory import CHECKPOINT, Digests, RunDirectory

LOG = logging.getLogger(__name__)
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Stage(Generic[T_co]):
    """A stage of a run. `compute` returns its result, from the results of earlier stages.

    `@partial(Stage, name, type)` turns the function below it into a stage. The functions of a stage
    receive the work that the stage is a part of: a `Maker` or a `Run`.

    `file` contains the result as JSON, or is a checkpoint. It is in the folder of the work, or in
    the folder of a side's responses if `place` is `BASELINE` or `CANDIDATE`. The stage itself
    writes the files in `writes`. It must also call `record` for files with names that are not known
    in advance. `digest` returns a digest of each input. A finished stage with the same inputs is
    not done again. If the inputs differ, InputError is raised. A stage without `digest` is fast and
    is done in every call. `files` returns the SHA-256 of files that were found while the stage ran,
    from its result. They are inputs, too. The stage is skipped unless `when` returns True.
    """

    name: str
    type: type[T_co]
    compute: Callable[..., T_co | None]
    file: str | None = None
    _: KW_ONLY
    digest: Callable[..., Digests] | None = None
    files: Callable[..., Digests] = lambda result: {}
    place: str = ""
    writes: tuple[str, ...] = ()
    when: Callable[..., bool] = lambda work: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder of stages' files. `part` distinguishes its stages in the directory's records."""

    folder: Path
    part: str = ""


class Work:
    """Stages in a run directory, and their results in this call.

    `places` maps the place of a stage to its folder. The place "" has the files of the work itself.
    """

    def __init__(
        self, directory: RunDirectory, options: EngineOptions, places: Mapping[str, Place]
    ) -> None:
        self.directory = directory
        self.options = options
        self.places = places
        self._results: dict[str, object] = {}
        # Maps the name of each finished stage to its name in the directory's records.
        self.recorded: dict[str, str] = {}

    @property
    def folder(self) -> Path:
        """Return the folder of files that belong to this work alone, such as its report."""
        return self.places[""].folder

    def is_reached(self, stage: Stage[object]) -> bool:
        """Return True if the stage has been done or skipped in this call."""
        return stage.name in self._results

    def get(self, stage: Stage[T]) -> T | None:
        """Return the result of an earlier stage, or None if it was skipped or returned nothing."""
        assert self.is_reached(stage), f"{stage.name} comes later"
        return cast("T | None", self._results[stage.name])

    def find(self, stage: Stage[T]) -> T | None:
        """Return the result of a stage, or None if it has no result so far."""
        return self.get(stage) if self.is_reached(stage) else None

    def result(self, stage: Stage[T]) -> T:
        """Return the result of a stage that was not skipped."""
        result = self.get(stage)
        assert result is not None, f"{stage.name} has left nothing"
        return result

    def store(self, stage: Stage[T], result: T | None) -> None:
        """Keep a result for later stages, and write it to the stage's file.

        A checkpoint is not written here, because the stage has already written it.
        """
        self._results[stage.name] = result
        path = self._path(stage)
        if path is not None and stage.file != CHECKPOINT and result is not None:
            record(path)
            write_text(path, to_json(result))

    def _path(self, stage: Stage[object]) -> Path | None:
        return None if stage.file is None else self.places[stage.place].folder / stage.file

    def _record_name(self, stage: Stage[object]) -> str:
        part = self.places[stage.place].part
        return f"{stage.name} ({part})" if part else stage.name

    def require_same_inputs(self, stage: Stage[object]) -> None:
        """Raise InputError if the stage was finished from other inputs."""
        if stage.digest is not None:
            self.directory.is_done(self._record_name(stage), stage.digest(self))

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds that each finished stage of this work took."""
        taken = self.directory.seconds
        return {stage: taken[name] for stage, name in self.recorded.items()}

    def do(self, *stages: Stage[object]) -> None:
        """Do each stage unless it is skipped, or was finished from the same inputs.

        Raises InputError if a stage was finished from other inputs.
        """
        for stage in stages:
            if stage.when(self):
                self._do(stage)
            else:
                self._results[stage.name] = None

    def _do(self, stage: Stage[object]) -> None:
        inputs = stage.digest(self) if stage.digest else None
        is_checkpoint = stage.file == CHECKPOINT
        name = self._record_name(stage)
        path = self._path(stage)
        if inputs is not None and self.directory.is_done(name, inputs):
            LOG.debug("%s: done before", name)
            self.recorded[stage.name] = name
            assert path is not None
            self._results[stage.name] = (
                read_index(path) if is_checkpoint else from_json(stage.type, path)
            )
            return
        for written in stage.writes:
            record(self.folder / written)
            self.folder.mkdir(parents=True, exist_ok=True)
        if is_checkpoint:
            assert path is not None
            record(path)
        start = time.monotonic()
        result = stage.compute(self)
        self.store(stage, result)
        seconds = time.monotonic() - start
        LOG.debug("%s: %.1f s", name, seconds)
        if inputs is not None:
            files = {} if result is None else stage.files(result)
            self.directory.finish(name, inputs, files, seconds, path if is_checkpoint else None)
            self.recorded[stage.name] = name
