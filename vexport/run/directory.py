"""The run directory: which stage is done, and from what it was made."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from vexport.checkpoint.data_name import DEFAULT, DEFAULT_FILE, data_files
from vexport.checkpoint.index import folder_digest
from vexport.errors import InputError
from vexport.files import digest_bytes, digest_file, from_json, to_json, write_text
from vexport.outputs import FolderKind
from vexport.outputs.log import LOG_FILE
from vexport.records import Report
from vexport.records.rounding import RoundingReport
from vexport.scenario import Calibration

STAGES_FILE = "stages.json"
REPORT_FILE = "report.json"
LAYERS = "layers.json"
ROUNDING = "rounding.json"
SCENARIO = "scenario.yaml"
MARK = ".vexport-run"
CHECKPOINT = "checkpoint"
# `entries` are all that a run writes: --overwrite refuses a folder with anything else in it.
KIND = FolderKind(
    name="a run directory",
    mark=MARK,
    text="A run directory of vexport. `vexport run --overwrite` replaces everything in it.\n",
    entries=frozenset(
        (STAGES_FILE, CHECKPOINT, SCENARIO, LOG_FILE, "calibration", "sensitivity", "eval")
        + (
            "plan.json",
            "layers.json",
            "rounding.json",
            "check.json",
            "load.json",
            "dry-load.json",
            "sensitivity.json",
        )
        + ("mixed.json", "report.*", "junit.xml", "model-card.md")
    ),
    checkpoints=frozenset((CHECKPOINT,)),
)


# Of what a stage was made from, by name.
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


class RunDirectory:
    """A folder whose stages are skipped when they are done and refused when their inputs changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        path = root / STAGES_FILE
        records = from_json(StageRecords, path) if path.is_file() else StageRecords(stages={})
        self._stages = dict(records.stages)

    def begin(self, *, overwrite: bool) -> None:
        """Make the folder, empty it with `overwrite`.

        InputError where it is something else's, and with `overwrite` where something else is in it.
        """
        KIND.require_own(self.root)
        if overwrite:
            KIND.require_replaceable(self.root, overwrite=True)
            KIND.begin(self.root)
            self._stages.clear()
        write_text(self.root / MARK, KIND.text)

    def is_done(self, stage: str, inputs: Digests) -> bool:
        """Return whether the stage is finished; InputError where it was made from something else."""
        record = self._stages.get(stage)
        if record is None:
            return False
        changed = sorted(name for name in inputs if inputs[name] != record.inputs.get(name, ""))
        if changed:
            raise InputError(
                f"{self.root} ({stage})",
                got=f"the run began with another {' and another '.join(changed)}",
                need="",
                fix="choose another --run-dir, or add --overwrite to start again",
            )
        if record.made and record.made != folder_digest(self.root / CHECKPOINT):
            raise InputError(
                str(self.root / CHECKPOINT),
                got="files have changed since the run wrote them: its results are about others",
                need="",
                fix="restore them, or add --overwrite to start again",
            )
        return True

    def finish(self, stage: str, inputs: Mapping[str, str], seconds: float, made: Path | None = None) -> None:
        """Record that a stage is done; its outputs, and a checkpoint that it `made`, must be in place."""
        record = StageRecord(inputs=inputs, seconds=seconds, made=folder_digest(made) if made else "")
        self._stages[stage] = record
        write_text(self.root / STAGES_FILE, to_json(StageRecords(stages=self._stages)))

    def adopt(self, other: "RunDirectory", stages: Sequence[str], folder: str) -> None:
        """Take the finished `stages` of another run, whose files lie in `folder`, where this one has none.

        What was made from other inputs is refused later, by `is_done`.
        """
        if any(name in self._stages for name in stages) or not any(name in other._stages for name in stages):
            return
        shutil.rmtree(self.root / folder, ignore_errors=True)
        shutil.copytree(other.root / folder, self.root / folder)
        self._stages |= {name: other._stages[name] for name in stages if name in other._stages}
        write_text(self.root / STAGES_FILE, to_json(StageRecords(stages=self._stages)))

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds that each finished stage took."""
        return {name: round(record.seconds, 3) for name, record in self._stages.items()}


def path_digest(path: Path) -> str:
    """SHA-256 of a file's bytes; InputError where it cannot be read."""
    try:
        return digest_file(path)
    except OSError as error:
        raise InputError(
            str(path), got=str(error.strerror), need="a readable file", fix="check the path"
        ) from None


def data_digest(settings: Calibration) -> str:
    """SHA-256 of calibration data's files; of a data set of the hub, its name."""
    if settings.data == DEFAULT:
        return path_digest(DEFAULT_FILE)
    path = settings.path
    if path is None:
        return value_digest(settings.data)
    if not path.is_dir():
        return path_digest(path)
    return value_digest([path_digest(file) for file in data_files(path)])


def value_digest(value: object) -> str:
    """The digest of a value's JSON."""
    return digest_bytes(TypeAdapter(type(value)).dump_json(value))


def read_report(folder: Path) -> Report:
    """The report of a finished run directory; InputError where there is none."""
    path = folder / REPORT_FILE
    if not path.is_file():
        runs = sorted(folder.glob(f"*/{REPORT_FILE}"))
        fix = f"name the runs in it: `vexport report {folder}/*`" if runs else "call `vexport run` first"
        got = f"no {REPORT_FILE}"
        raise InputError(str(folder), got=got, need="a finished run directory", fix=fix)
    return from_json(Report, path)


def rounding_of(folder: Path) -> RoundingReport | None:
    """Read how the weights of a run's checkpoint were rounded; None where no calibration text decided it."""
    file = folder / ROUNDING
    return from_json(RoundingReport, file) if file.is_file() else None


def portable(argument: str) -> str:
    """A word of a command line without the path of the current folder, of `--option=PATH` too."""
    here = f"{Path.cwd().as_posix().rstrip('/')}/"
    option, equals, value = argument.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={portable(value)}"
    return argument.removeprefix(here) if len(here) > 1 else argument
