"""Manage a run directory: its finished stages, the digests of their inputs, and its log."""

import logging
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from vexport.calibration.folders import data_files
from vexport.checkpoint.index import folder_digest
from vexport.checkpoint.source import DEFAULT, DEFAULT_FILE, parse_data
from vexport.errors import InputError
from vexport.files import digest_bytes, digest_file, from_json, to_json, write_text
from vexport.inference.options import CANDIDATE
from vexport.outputs.manifest import (
    is_recorded,
    record,
    remove_recorded,
    unlisted_entries,
)
from vexport.outputs.replaceable import FolderKind, locked_folder, require_no_others
from vexport.records.calibration import CalibrationData, RoundingReport
from vexport.records.values import join_limited
from vexport.reports.run_record import Report
from vexport.rules import outputs as rules
from vexport.rules import results
from vexport.scenario import Calibration
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
RUN_DIR = "--run-dir"
CHECKPOINT = "checkpoint"
KIND = FolderKind(
    name="a run directory",
    mark=MARK,
    text="A run directory of vexport. The option --overwrite replaces everything in it.\n",
    checkpoint=CHECKPOINT,
)
_RESTART = "add --overwrite to start again"
# Maximum number of changed inputs in an error.
MOST_CHANGES = 3
# Digests of a stage's inputs, by name.
Digests = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """Inputs of a finished stage (name -> digest), and the seconds that the stage took.

    `files` maps further inputs, which were found while the stage ran, to their SHA-256: the
    pictures that its data names.
    `made` is the digest of the checkpoint that the stage made. It is empty for other stages.
    """

    inputs: Mapping[str, str]
    seconds: float
    files: Mapping[str, str] = field(default_factory=dict)
    made: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecords:
    """Finished stages of a run directory."""

    stages: Mapping[str, StageRecord]


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
        KIND.require_own(self.root)
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
            raise InputError.of(
                rules.OTHER_NUMBER,
                str(self.root),
                found=found,
                given=given,
                option=self.option,
                restart=_RESTART,
            )

    def is_done(self, stage: str, inputs: Digests) -> bool:
        """Return True if the stage is finished.

        Raises InputError if the stage was finished from other inputs, or if files of the checkpoint
        that it made have changed since.
        """
        record = self._stages.get(stage)
        if record is None:
            return False
        changed = sorted(name for name in inputs if inputs[name] != record.inputs.get(name))
        changed += sorted(
            file for file in record.files if _digest_if_any(Path(file)) != record.files[file]
        )
        if changed:
            others = join_limited(changed, " and another ", MOST_CHANGES)
            raise InputError.of(
                rules.OTHER_INPUTS,
                str(self.root),
                changed=others,
                stage=stage,
                option=self.option,
                restart=_RESTART,
            )
        if record.made and record.made != folder_digest(self.root / CHECKPOINT):
            where = str(self.root / CHECKPOINT)
            raise InputError.of(rules.CHANGED_FILES, where, restart=_RESTART)
        return True

    def finish(
        self, stage: str, inputs: Digests, files: Digests, seconds: float, made: Path | None = None
    ) -> None:
        """Record that a stage is done.

        The stage's outputs must exist. `made` is the folder of the checkpoint, if they include one.
        """
        found = {portable(file): digest for file, digest in files.items()}
        made_digest = folder_digest(made) if made else ""
        finished = StageRecord(inputs=inputs, files=found, seconds=seconds, made=made_digest)
        self._record({stage: finished})

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


def _digest_if_any(file: Path) -> str:
    return digest_file(file) if file.is_file() else ""


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
        raise InputError.of(results.NO_REPORT, str(folder), file=REPORT_FILE, remedy=fix)
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


@contextmanager
def opened(root: Path, option: str = RUN_DIR, *, overwrite: bool) -> Iterator[RunDirectory]:
    """Yield the run directory, locked and with its log. With `overwrite` it is emptied first."""
    with locked_folder(root, option):
        directory = RunDirectory(root, option)
        directory.begin(overwrite=overwrite)
        with logged_to(root):
            yield directory
