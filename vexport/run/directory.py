"""A run under way: its stages, its directory, which stage is done, and from what it was made."""

import logging
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar, cast

from pydantic import TypeAdapter

from vexport.checkpoint.index import SourceIndex, folder_digest, read_index
from vexport.checkpoint.source import DEFAULT, DEFAULT_FILE, data_files, resolve_source
from vexport.errors import InputError
from vexport.files import digest_bytes, digest_file, from_json, to_json, write_text
from vexport.inference.options import BASELINE, CANDIDATE, NO_EVALUATION, EngineOptions
from vexport.outputs.manifest import has_manifest, is_recorded, record, remove_recorded, strangers
from vexport.outputs.replaceable import FolderKind, refuse_others
from vexport.plan.build import PlanSettings
from vexport.plan.source import settings_of, source_index
from vexport.quantize.layer_groups import LayerGroup, find_layer_groups
from vexport.records.calibration import RoundingReport
from vexport.reports.report import Report
from vexport.run.given import Given, RunModel
from vexport.run.options import EXPLAINING, Explaining
from vexport.scenario import Calibration, Evaluate, Scenario
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
# The mark of the output folder of `vexport eval` before it recorded its stages.
OLD_EVALUATION_MARK = ".vexport-eval"
RUN_DIR = "--run-dir"
CHECKPOINT = "checkpoint"
KIND = FolderKind(
    name="a run directory",
    mark=MARK,
    text="A run directory of vexport. The option --overwrite replaces everything in it.\n",
    checkpoint=CHECKPOINT,
)
# Digests of a stage's inputs, by name.
Digests = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """The inputs of a finished stage (name -> digest) and the seconds it took.

    `made` is the digest of a checkpoint that the stage has made, empty for all else.
    """

    inputs: Mapping[str, str]
    seconds: float
    made: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecords:
    """The finished stages of a run directory."""

    stages: Mapping[str, StageRecord]


def require_run_folder(root: Path, option: str = RUN_DIR) -> None:
    """Raise InputError unless `root` can be, or is, a run directory; `option` names the folder."""
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

    A stage is skipped if it is done, and refused if its inputs have changed. `option` is the option
    that names the folder in errors.
    """

    def __init__(self, root: Path, option: str = RUN_DIR) -> None:
        self.root = root
        self.option = option
        path = root / STAGES_FILE
        self._stages = dict(from_json(StageRecords, path).stages) if path.is_file() else {}

    def begin(self, *, overwrite: bool) -> None:
        """Make the folder; empty it with `overwrite`.

        Raises InputError if the folder is not vexport's, or with `overwrite` if it holds other
        files.
        """
        require_run_folder(self.root, self.option)
        if overwrite:
            KIND.require_replaceable(self.root, overwrite=True)
        if overwrite or not (self.root / MARK).is_file():
            KIND.begin(self.root)
            self._stages.clear()

    def is_done(self, stage: str, inputs: Digests) -> bool:
        """Return whether the stage is finished; InputError where it was made from something
        else.
        """
        record = self._stages.get(stage)
        if record is None:
            return False
        changed = sorted(name for name in inputs if inputs[name] != record.inputs.get(name, ""))
        if changed:
            raise InputError(
                f"{self.root} ({stage})",
                got=f"the run began with another {' and another '.join(changed)}",
                need="",
                fix=f"choose another {self.option}, or {self._how_to_start_again()}",
            )
        if record.made and record.made != folder_digest(self.root / CHECKPOINT):
            raise InputError(
                str(self.root / CHECKPOINT),
                got="files have changed since the run wrote them: its results are about others",
                need="",
                fix=f"restore them, or {self._how_to_start_again()}",
            )
        return True

    def _how_to_start_again(self) -> str:
        """Return what to do with results that are of no use: --overwrite needs the list of the
        files.
        """
        if has_manifest(self.root):
            return "add --overwrite to start again"
        return f"move the folder away, which an older version made (mv {self.root} {self.root}.old)"

    def finish(self, stage: str, inputs: Digests, seconds: float, made: Path | None = None) -> None:
        """Record that a stage is done; its outputs, and a checkpoint that it `made`, must be in
        place.
        """
        made_digest = folder_digest(made) if made else ""
        self._record({stage: StageRecord(inputs=inputs, seconds=seconds, made=made_digest)})

    def adopt(self, other: "RunDirectory", stages: Sequence[str], folder: str) -> None:
        """Take the finished `stages` of another run, whose files lie in `folder`, where this one
        has none.

        What was made from other inputs is refused later, by `is_done`.
        """
        finished = {name: other._stages[name] for name in stages if name in other._stages}
        if finished and not any(name in self._stages for name in stages):
            refuse_others(self.root, strangers(self.root, self.root / folder))
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
        """The seconds that each finished stage took."""
        return {name: round(record.seconds, 3) for name, record in self._stages.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Stage(Generic[T_co]):
    """One stage of a run; `make` returns its result, from the results of earlier stages.

    `@partial(Stage, name, type)` turns the function below it into a stage.

    `file` holds the result as JSON, or is a checkpoint. It lies in the folder of the run, or in the
    folder of a model's answers if `place` is `BASELINE` or `CANDIDATE`. The stage itself writes the
    files in `writes`; it records files whose names are not known in advance. `digest` returns a
    digest of each input. A stage is not done again if it was finished from the same inputs. Other
    inputs are an InputError. A stage without `digest` takes no time and is done at every call.

    The stage is skipped unless `when` returns True. With `makes_checkpoint` it is also skipped in
    a run whose checkpoint is given.
    """

    name: str
    type: type[T_co]
    make: Callable[["Run"], T_co | None]
    file: str | None = None
    _: KW_ONLY
    digest: Callable[["Run"], Digests] | None = None
    place: str = ""
    writes: tuple[str, ...] = ()
    when: Callable[["Run"], bool] = lambda run: True
    makes_checkpoint: bool = False


class Run:
    """A scenario, or models that were given, in a run directory.

    Several runs of given models share a `directory` and its baseline.
    """

    def __init__(
        self,
        work: Scenario | Given,
        root: Path,
        options: EngineOptions,
        explaining: Explaining = EXPLAINING,
        directory: RunDirectory | None = None,
    ) -> None:
        self.work = work
        self.root = root
        self.options = options
        self.explaining = explaining
        self.directory = directory or RunDirectory(root)
        self._results: dict[str, object] = {}
        # The names under which the directory records this run's stages, by the stage's own name.
        self._recorded: dict[str, str] = {}

    @property
    def scenario(self) -> Scenario:
        """The scenario of a run that makes its checkpoint."""
        assert isinstance(self.work, Scenario), "the checkpoint of this run is given"
        return self.work

    @property
    def given(self) -> Given | None:
        """The models of a run whose checkpoint is given, None for a scenario."""
        return self.work if isinstance(self.work, Given) else None

    @property
    def folder(self) -> Path:
        """The folder of the run's own files, such as its report."""
        is_part = self.given is not None and bool(self.given.part)
        return self.place(CANDIDATE) if is_part else self.root

    def place(self, role: str) -> Path:
        """Return the folder for the answers of `BASELINE` or `CANDIDATE`."""
        if self.given is None:
            return self.root / "eval" / role
        return self.root / role / (self.given.part if role == CANDIDATE else "")

    def model(self, role: str) -> RunModel | None:
        """Return the model with the role `BASELINE` or `CANDIDATE`, None if there is no baseline.

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
        return RunModel(name=str(folder), role=role, checkpoint=folder, url=url)

    def asks(self, role: str) -> bool:
        """Return whether the run asks the model with this role."""
        if self.given is None:
            return True
        model = self.model(role)
        return model is not None and model.is_asked

    def answers(self, role: str) -> Path:
        """Return the folder or file with the answers of a model that the run has."""
        model = self.model(role) if self.given is not None else None
        if model is not None and model.answers is not None:
            return model.answers
        return self.place(role)

    @property
    def checkpoint(self) -> Path:
        """The folder of the checkpoint that the run makes."""
        return self.root / CHECKPOINT

    @property
    def planning(self) -> PlanSettings:
        """The settings of the plan besides the rules."""
        return settings_of(self.scenario)

    @property
    def evaluation(self) -> Evaluate:
        """How models are asked and judged; no tasks and no text if no evaluation is asked for."""
        return self.work.evaluate or NO_EVALUATION

    @cached_property
    def index(self) -> SourceIndex:
        """The source's headers."""
        return source_index(
            self.scenario.source,
            self.scenario.rules,
            self.options.on_progress,
            trust_remote_code=self.options.trust_remote_code,
        )

    @cached_property
    def units(self) -> tuple[LayerGroup, ...]:
        """The groups of layers that can be given a scheme of their own."""
        return find_layer_groups(self.index, self.scenario.rules, self.scenario.auto, self.planning)

    @cached_property
    def baseline(self) -> Path:
        """The checkpoint that the scenario's checkpoint is compared with."""
        return resolve_source(
            self.evaluation.baseline or self.scenario.source, self.options.on_progress
        )

    def is_reached(self, stage: Stage[object]) -> bool:
        """Return whether the stage has been done or skipped in this call."""
        return stage.name in self._results

    def get(self, stage: Stage[T]) -> T | None:
        """Return the result of an earlier stage; None if it was skipped or found nothing."""
        assert self.is_reached(stage), f"{stage.name} comes later"
        return cast("T | None", self._results[stage.name])

    def result(self, stage: Stage[T]) -> T:
        """The result of a stage that must have been run."""
        result = self.get(stage)
        assert result is not None, f"{stage.name} has left nothing"
        return result

    def keep(self, stage: Stage[T], result: T | None) -> None:
        """Keep a result for later stages, and write it to the stage's file.

        A checkpoint is in place already.
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
        part = self.given.part if self.given is not None else ""
        return f"{stage.name} ({part})" if part and stage.place != BASELINE else stage.name

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds that each finished stage of this run took."""
        taken = self.directory.seconds
        return {stage: taken[name] for stage, name in self._recorded.items()}

    def do(self, stage: Stage[object]) -> None:
        """Do a stage unless it is skipped, or was finished from the same inputs.

        Raises InputError if it was finished from other inputs.
        """
        is_for_others = stage.makes_checkpoint and self.given is not None
        if is_for_others or not stage.when(self):
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
        self.keep(stage, stage.make(self))
        seconds = time.monotonic() - start
        LOG.debug("%s: %.1f s", name, seconds)
        if inputs is not None:
            self.directory.finish(name, inputs, seconds, self.checkpoint if is_checkpoint else None)
            self._recorded[stage.name] = name


def data_digest(settings: Calibration) -> str:
    """SHA-256 of calibration data's files; of a data set of the hub, its name."""
    path = DEFAULT_FILE if settings.data == DEFAULT else settings.path
    if path is None:
        return value_digest(settings.data)
    if not path.is_dir():
        return digest_file(path)
    return value_digest([digest_file(file) for file in data_files(path)])


def value_digest(value: object) -> str:
    """The digest of a value's JSON."""
    return digest_bytes(TypeAdapter(type(value)).dump_json(value))


def read_report(folder: Path) -> Report:
    """Read the report of a finished run; InputError if there is none."""
    path = folder / REPORT_FILE
    if not path.is_file():
        fix = "call `vexport run` first"
        for pattern in ("*", f"{CANDIDATE}/*"):
            if any(folder.glob(f"{pattern}/{REPORT_FILE}")):
                fix = f"name the runs in it: `vexport report {folder}/{pattern}`"
        raise InputError(
            str(folder), got=f"no {REPORT_FILE}", need="a finished run directory", fix=fix
        )
    return from_json(Report, path)


def rounding_of(folder: Path) -> RoundingReport | None:
    """Read how the weights of a run's checkpoint were rounded; None where no calibration text
    decided it.
    """
    file = folder / ROUNDING
    return from_json(RoundingReport, file) if file.is_file() else None


def portable(argument: str) -> str:
    """A word of a command line without the path of the current folder, of `--option=PATH` too."""
    here = f"{Path.cwd().as_posix().rstrip('/')}/"
    option, equals, value = argument.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={portable(value)}"
    return argument.removeprefix(here) if len(here) > 1 else argument


LOG_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


class _LogFile(logging.FileHandler):
    """A log in a file. On a full disk it ends early: the command reports what else it could not
    write.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback."""

    def close(self) -> None:
        """Close the file, also if the rest of the log does not fit."""
        with suppress(OSError):
            super().close()


@contextmanager
def logged_to(folder: Path) -> Iterator[None]:
    """Log to FOLDER/vexport.log too inside the block, and the error that ends it."""
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
