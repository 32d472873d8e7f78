"""Manage a run: its stages, its directory, its finished stages and the digests of their inputs."""

import logging
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar, cast

from pydantic import TypeAdapter

from vexport.calibration.folders import data_files
from vexport.checkpoint.index import SourceIndex, folder_digest, read_index
from vexport.checkpoint.source import DEFAULT, DEFAULT_FILE, parse_data, resolve_source
from vexport.errors import InputError
from vexport.files import digest_bytes, digest_file, from_json, to_json, write_text
from vexport.inference.options import BASELINE, CANDIDATE, NO_EVALUATION, EngineOptions
from vexport.names import Folder, ResultFiles, Server
from vexport.outputs.manifest import (
    has_manifest,
    is_recorded,
    record,
    remove_recorded,
    unlisted_entries,
)
from vexport.outputs.replaceable import FolderKind, require_no_others
from vexport.plan.build import PlanSettings
from vexport.plan.source import scenario_settings, source_index
from vexport.quantize.layer_groups import LayerGroup, find_layer_groups
from vexport.records.calibration import CalibrationData, RoundingReport
from vexport.records.values import join_limited
from vexport.reports.run_record import Report
from vexport.run.given import Given, RunModel
from vexport.run.options import DEFAULT_ATTRIBUTION, AttributionSettings
from vexport.scenario import Calibration, Evaluate, Scenario, Variant
from vexport.scenario.serve import EngineArguments
from vexport.version import __version__

LOG = logging.getLogger(__name__)
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
STAGES_FILE = "stages.json"
LOG_FILE = "vexport.log"
REPORT_FILE = "report.json"
LAYERS = "layers.json"
ROUNDING = "rounding.json"
SCENARIO = "scenario.yaml"
MARK = ".vexport-run"
# The mark in output folders of older versions of `vexport eval`, which did not record stages.
OLD_EVALUATION_MARK = ".vexport-eval"
RUN_DIR = "--run-dir"
CHECKPOINT = "checkpoint"
KIND = FolderKind(
    name="a run directory",
    mark=MARK,
    text="A run directory of vexport. The option --overwrite replaces everything in it.\n",
    checkpoint=CHECKPOINT,
)
# Maximum number of changed inputs in an error.
MOST_CHANGES = 3
# Digests of a stage's inputs, by name.
Digests = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """Inputs of a finished stage (name -> digest), and the seconds that the stage took.

    `made` is the digest of the checkpoint that the stage made. It is empty for other stages.
    """

    inputs: Mapping[str, str]
    seconds: float
    made: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecords:
    """Finished stages of a run directory."""

    stages: Mapping[str, StageRecord]


def require_run_folder(root: Path, option: str = RUN_DIR) -> None:
    """Raise InputError unless `root` is a run directory or can become one.

    `option` is the option that sets the folder.
    """
    if (root / OLD_EVALUATION_MARK).is_file() and not (root / MARK).is_file():
        raise InputError(
            str(root),
            got="the results of `vexport eval` of an older version, without a record of its stages",
            need="a new folder or a run directory",
            fix=f"choose another {option}, or move the folder away (mv {root} {root}.old)",
        )
    KIND.require_own(root)


class RunDirectory:
    """A folder that records its finished stages.

    A finished stage is skipped. If the stage's inputs have changed, InputError is raised. `option`
    is the option that sets the folder, for error messages.
    """

    def __init__(self, root: Path, option: str = RUN_DIR) -> None:
        self.root = root
        self.option = option
        path = root / STAGES_FILE
        self._stages = dict(from_json(StageRecords, path).stages) if path.is_file() else {}

    def begin(self, *, overwrite: bool) -> None:
        """Create the folder, or empty it with `overwrite`.

        Raises InputError if vexport did not create the folder, or with `overwrite` if the folder
        has other files.
        """
        require_run_folder(self.root, self.option)
        if overwrite:
            KIND.require_replaceable(self.root, overwrite=True)
        if overwrite or not (self.root / MARK).is_file():
            KIND.begin(self.root)
            self._stages.clear()

    def require_same_number(self, checkpoints: int) -> None:
        """Raise InputError unless this and the earlier call both have one checkpoint, or several.

        Otherwise this call and the earlier call would overwrite each other's responses.
        """
        has_several = any(" (" in stage for stage in self._stages)
        has_one = "serve candidate" in self._stages
        if has_several and checkpoints == 1 or has_one and checkpoints > 1:
            found, given = (
                ("several checkpoints", "one") if has_several else ("one checkpoint", "several")
            )
            raise InputError(
                str(self.root),
                got=f"the results of {found}, but this call evaluates {given}",
                need="",
                fix=f"choose another {self.option}, or {self._restart_remedy()}",
            )

    def is_done(self, stage: str, inputs: Digests) -> bool:
        """Return True if the stage is finished.

        Raises InputError if the stage was finished from other inputs, or if files of the checkpoint
        that it made have changed since.
        """
        record = self._stages.get(stage)
        if record is None:
            return False
        changed = sorted(name for name in inputs if inputs[name] != record.inputs.get(name, ""))
        if changed:
            # An older version has recorded its inputs under other names.
            known = [name for name in changed if name in record.inputs]
            others = join_limited(known, " and another ", MOST_CHANGES)
            raise InputError(
                str(self.root),
                got=f"an earlier run with another {others} (stage {stage!r})"
                if known
                else "a run of an older version of vexport, which cannot be resumed",
                need="",
                fix=f"choose another {self.option}, or {self._restart_remedy()}",
            )
        if record.made and record.made != folder_digest(self.root / CHECKPOINT):
            raise InputError(
                str(self.root / CHECKPOINT),
                got="files that have changed since the run wrote them, so its results are outdated",
                need="",
                fix=f"restore them, or {self._restart_remedy()}",
            )
        return True

    def _restart_remedy(self) -> str:
        """Return the remedy for results that cannot be used any more.

        --overwrite needs the folder's list of files, which older versions did not write.
        """
        if has_manifest(self.root):
            return "add --overwrite to start again"
        return f"move the folder away, which an older version made (mv {self.root} {self.root}.old)"

    def finish(self, stage: str, inputs: Digests, seconds: float, made: Path | None = None) -> None:
        """Record that a stage is done.

        The stage's outputs must exist. `made` is the folder of the checkpoint, if they include one.
        """
        made_digest = folder_digest(made) if made else ""
        self._record({stage: StageRecord(inputs=inputs, seconds=seconds, made=made_digest)})

    def copy_stages(self, other: "RunDirectory", stages: Sequence[str], folder: str) -> None:
        """Copy the finished `stages` of another run, with their files in `folder`.

        Nothing is copied if this run has finished any of these stages. If the inputs differ,
        `is_done` raises an error later.
        """
        finished = {name: other._stages[name] for name in stages if name in other._stages}
        if finished and not any(name in self._stages for name in stages):
            require_no_others(self.root, unlisted_entries(self.root, self.root / folder))
            remove_recorded(self.root, self.root / folder)
            for file in sorted((other.root / folder).rglob("*")):
                if file.is_file() and is_recorded(file):
                    copy = self.root / file.relative_to(other.root)
                    record(copy)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, copy)
            self._record(finished)

    def _record(self, finished: Mapping[str, StageRecord]) -> None:
        self._stages |= finished
        record(self.root / STAGES_FILE)
        write_text(self.root / STAGES_FILE, to_json(StageRecords(stages=self._stages)))

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds that each finished stage took."""
        return {name: round(record.seconds, 3) for name, record in self._stages.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Stage(Generic[T_co]):
    """A stage of a run. `compute` returns its result, from the results of earlier stages.

    `@partial(Stage, name, type)` turns the function below it into a stage.

    `file` contains the result as JSON, or is a checkpoint. It is in the folder of the run, or in
    the folder of a model's responses if `place` is `BASELINE` or `CANDIDATE`. The stage itself
    writes the files in `writes`. It must also call `record` for files with names that are not known
    in advance. `digest` returns a digest of each input. A finished stage with the same inputs is
    not done again. If the inputs differ, InputError is raised. A stage without `digest` is fast and
    is done in every call.

    The stage is skipped unless `when` returns True. With `makes_checkpoint` it is also skipped in a
    run with a given checkpoint.
    """

    name: str
    type: type[T_co]
    compute: Callable[["Run"], T_co | None]
    file: str | None = None
    _: KW_ONLY
    digest: Callable[["Run"], Digests] | None = None
    place: str = ""
    writes: tuple[str, ...] = ()
    when: Callable[["Run"], bool] = lambda run: True
    makes_checkpoint: bool = False


class Run:
    """A scenario, or given models, in a run directory.

    Several runs of given models can share a `directory` and the responses of its baseline.
    """

    def __init__(
        self,
        work: Scenario | Given,
        root: Path,
        options: EngineOptions,
        attribution_settings: AttributionSettings = DEFAULT_ATTRIBUTION,
        directory: RunDirectory | None = None,
    ) -> None:
        self.work = work
        self.root = root
        self.options = options
        self.attribution_settings = attribution_settings
        self.directory = directory or RunDirectory(root)
        self._results: dict[str, object] = {}
        # Maps the name of each finished stage to its name in the directory's records.
        self._recorded: dict[str, str] = {}

    @property
    def scenario(self) -> Scenario:
        """Return the scenario of a run that makes its checkpoint."""
        assert isinstance(self.work, Scenario), "the checkpoint of this run is given"
        return self.work

    @property
    def given(self) -> Given | None:
        """Return the models of a run with a given checkpoint, or None for a scenario."""
        return self.work if isinstance(self.work, Given) else None

    @property
    def folder(self) -> Path:
        """Return the folder of files that belong to this run alone, such as its report."""
        is_part = self.given is not None and bool(self.given.candidate_folder)
        return self.place(CANDIDATE) if is_part else self.root

    def place(self, role: str) -> Path:
        """Return the folder for the responses of `BASELINE` or `CANDIDATE`."""
        if self.given is None:
            return self.root / "eval" / role
        part = self.given.candidate_folder if role == CANDIDATE else ""
        return self.root / self.given.results_folder / role / part

    def model(self, role: str) -> RunModel | None:
        """Return the model with the role `BASELINE` or `CANDIDATE`, or None if there is no
        baseline.

        The scenario's baseline is downloaded if it is not on this machine.
        """
        if self.given is not None:
            return self.given.baseline if role == BASELINE else self.given.candidate
        if role == BASELINE:
            folder = self.baseline
            url = self.evaluation.baseline_endpoint
        else:
            folder = self.checkpoint
            url = self.evaluation.endpoint
        ref = Folder.at(folder) if url is None else Server(url)
        return RunModel(ref=ref, role=role, checkpoint=folder)

    def needs_answers(self, role: str) -> bool:
        """Return True if the run must get responses from the model with this role."""
        if self.given is None:
            return True
        model = self.model(role)
        return model is not None and model.needs_answers

    def engine(self, role: str) -> EngineOptions:
        """Return the options of the engine of the model with this role."""
        variant = self._variant(role)
        if variant is None:
            return self.options
        return replace(self.options, serve=variant.serve, vllm_python=variant.vllm_python)

    def arguments(self, role: str) -> EngineArguments:
        """Return vLLM's arguments for the model with this role.

        A baseline is served without the arguments that quantize the model, unless it is a variant
        of the same checkpoint.
        """
        is_unquantized = role == BASELINE and self._variant(role) is None
        return self.engine(role).serve.arguments(is_baseline=is_unquantized)

    def _variant(self, role: str) -> Variant | None:
        model = self.model(role) if self.given is not None else None
        return None if model is None else model.variant

    def answers(self, role: str) -> Path:
        """Return the path of a model's responses: the given results, or a folder of the run."""
        model = self.model(role) if self.given is not None else None
        if model is not None and isinstance(model.ref, ResultFiles):
            return model.ref.path
        return self.place(role)

    @property
    def checkpoint(self) -> Path:
        """Return the folder of the checkpoint that the run makes."""
        return self.root / CHECKPOINT

    @property
    def planning(self) -> PlanSettings:
        """Return the settings of the plan, without the rules."""
        return scenario_settings(self.scenario)

    @property
    def evaluation(self) -> Evaluate:
        """Return the settings of the evaluation.

        They have no tasks and no text if the run does not evaluate.
        """
        return self.work.evaluate or NO_EVALUATION

    @cached_property
    def index(self) -> SourceIndex:
        """Return the source's headers."""
        return source_index(
            self.scenario.source,
            self.scenario.rules,
            self.options.on_progress,
            trust_remote_code=self.options.trust_remote_code,
        )

    @cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Return the groups of layers that can be given a scheme independently of other layers."""
        return find_layer_groups(self.index, self.scenario.rules, self.scenario.auto, self.planning)

    @cached_property
    def baseline(self) -> Path:
        """Return the checkpoint with which the scenario's checkpoint is compared."""
        return resolve_source(
            self.evaluation.baseline or self.scenario.source, self.options.on_progress
        )

    def is_reached(self, stage: Stage[object]) -> bool:
        """Return True if the stage has been done or skipped in this call."""
        return stage.name in self._results

    def get(self, stage: Stage[T]) -> T | None:
        """Return the result of an earlier stage, or None if it was skipped or returned nothing."""
        assert self.is_reached(stage), f"{stage.name} comes later"
        return cast("T | None", self._results[stage.name])

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
        """Return the path of the stage's file."""
        if stage.file is None:
            return None
        return (self.place(stage.place) if stage.place else self.folder) / stage.file

    def _record_name(self, stage: Stage[object]) -> str:
        """Return the stage's name in the directory's records, which several runs may share."""
        if self.given is None:
            return stage.name
        part = "" if stage.place == BASELINE else self.given.candidate_folder
        place = "/".join(filter(None, (self.given.results_folder, part)))
        return f"{stage.name} ({place})" if place else stage.name

    def require_same_inputs(self, stage: Stage[object]) -> None:
        """Raise InputError if the stage was finished from other inputs."""
        if stage.digest is not None:
            self.directory.is_done(self._record_name(stage), stage.digest(self))

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds that each finished stage of this run took."""
        taken = self.directory.seconds
        return {stage: taken[name] for stage, name in self._recorded.items()}

    def do(self, stage: Stage[object]) -> None:
        """Do a stage unless it is skipped, or was finished from the same inputs.

        Raises InputError if it was finished from other inputs.
        """
        needs_scenario = stage.makes_checkpoint and self.given is not None
        if needs_scenario or not stage.when(self):
            self._results[stage.name] = None
            return
        inputs = stage.digest(self) if stage.digest else None
        is_checkpoint = stage.file == CHECKPOINT
        name = self._record_name(stage)
        path = self._path(stage)
        if inputs is not None and self.directory.is_done(name, inputs):
            LOG.debug("%s: done before", name)
            self._recorded[stage.name] = name
            assert path is not None
            self._results[stage.name] = (
                read_index(path) if is_checkpoint else from_json(stage.type, path)
            )
            return
        for written in stage.writes:
            record(self.folder / written)
            self.folder.mkdir(parents=True, exist_ok=True)
        if is_checkpoint:
            record(self.checkpoint)
        start = time.monotonic()
        self.store(stage, stage.compute(self))
        seconds = time.monotonic() - start
        LOG.debug("%s: %.1f s", name, seconds)
        if inputs is not None:
            self.directory.finish(name, inputs, seconds, self.checkpoint if is_checkpoint else None)
            self._recorded[stage.name] = name


def data_digest(settings: Calibration) -> str:
    """Return the SHA-256 of all calibration data.

    Local data is digested by its files, and a data set on the hub by its name.
    """
    digests = [_source_digest(data) for data in settings.sources()]
    return digests[0] if len(digests) == 1 else value_digest(digests)


def _source_digest(data: CalibrationData) -> str:
    name = parse_data(data.name)
    if name.kind == "hub":
        return value_digest(data.name)
    path = DEFAULT_FILE if name.kind == DEFAULT else name.path
    if not path.is_dir():
        return digest_file(path)
    return value_digest([digest_file(file) for file in data_files(data)])


def value_digest(value: object) -> str:
    """Return the digest of a value's JSON."""
    return digest_bytes(TypeAdapter(type(value)).dump_json(value))


def read_report(folder: Path) -> Report:
    """Read the report of a finished run, from its directory or from its report.json.

    Raises InputError if there is no report.
    """
    path = folder if folder.is_file() else folder / REPORT_FILE
    if not path.is_file():
        fix = "call `vexport run` first"
        if (folder / MARK).is_file():
            fix = (
                "call the same command again to finish it; a call of `vexport eval` with --accept "
                "FILE alone compares nothing and writes no report: use `vexport report FILE`"
            )
        for pattern in ("*", f"{CANDIDATE}/*"):
            if any(folder.glob(f"{pattern}/{REPORT_FILE}")):
                fix = f"name the runs in it: `vexport report {folder}/{pattern}`"
        raise InputError(
            str(folder), got=f"no {REPORT_FILE}", need="a finished run directory", fix=fix
        )
    return from_json(Report, path)


def rounding_of(folder: Path) -> RoundingReport | None:
    """Read how the weights of a run's checkpoint were rounded.

    Returns None if no calibration text was used for rounding.
    """
    file = folder / ROUNDING
    return from_json(RoundingReport, file) if file.is_file() else None


def portable(argument: str) -> str:
    """Return a word of a command line, with a path below the current folder made relative.

    The path in `--option=PATH` is shortened too.
    """
    here = f"{Path.cwd().as_posix().rstrip('/')}/"
    option, equals, value = argument.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={portable(value)}"
    return argument.removeprefix(here) if len(here) > 1 else argument


LOG_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


class _LogFile(logging.FileHandler):
    """A log in a file.

    If the disk is full, the log ends early without an error. The command itself reports the other
    files that it cannot write.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback."""

    def close(self) -> None:
        """Close the file, also if the rest of the log does not fit."""
        with suppress(OSError):
            super().close()


@contextmanager
def logged_to(folder: Path) -> Iterator[None]:
    """Also log to FOLDER/vexport.log inside the block, including the error that ends the block."""
    record(folder / LOG_FILE)
    logger, handler = logging.getLogger("vexport"), _LogFile(folder / LOG_FILE, encoding="utf-8")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logger.addHandler(handler)
    try:
        logger.debug(
            "vexport %s, Python %s: %s",
            __version__,
            platform.python_version(),
            shlex.join(sys.argv),
        )
        yield
    except BaseException as error:
        handler.handle(
            logging.makeLogRecord({"levelname": "ERROR", "msg": f"{type(error).__name__}: {error}"})
        )
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()
