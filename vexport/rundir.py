"""The run directory: which stage is done, and from what it was made."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from vexport.checkpoint.index import weight_files
from vexport.errors import InputError
from vexport.files import digest_bytes, digest_file, from_json, to_json, write_text

STAGES_FILE = "stages.json"
Digests = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """What a finished stage was made from (name of the input -> digest) and the seconds it took."""

    inputs: Digests
    seconds: float


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

    def is_done(self, stage: str, inputs: Digests) -> bool:
        """Whether the stage is finished; InputError where it was made from something else."""
        record = self._stages.get(stage)
        if record is None:
            return False
        changed = sorted(name for name in inputs if record.inputs.get(name) != inputs[name])
        if changed:
            raise InputError(
                f"{self.root} ({stage})",
                got=f"results made from another {' and another '.join(changed)}",
                need="the inputs that the run began with",
                fix="choose another --run-dir, or add --overwrite to start again",
            )
        return True

    def finish(self, stage: str, inputs: Digests, seconds: float) -> None:
        """Record that a stage is done; its outputs must be in place already."""
        self._stages[stage] = StageRecord(inputs=dict(inputs), seconds=seconds)
        write_text(self.root / STAGES_FILE, to_json(StageRecords(stages=self._stages)))

    @property
    def seconds(self) -> dict[str, float]:
        """How long each finished stage took."""
        return {name: round(record.seconds, 3) for name, record in self._stages.items()}


def checkpoint_digest(root: Path) -> str:
    """A digest that changes when a checkpoint is replaced: its config, its weight files' sizes and times."""
    parts = [digest_file(root / "config.json")]
    for file in weight_files(root):
        status = file.stat()
        parts.append(f"{file.name}:{status.st_size}:{status.st_mtime_ns}")
    return digest_bytes("\n".join(parts).encode())


def value_digest(value: object) -> str:
    """The digest of a value's JSON."""
    return digest_bytes(TypeAdapter(type(value)).dump_json(value))
