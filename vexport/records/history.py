"""Records of a history: the results of one model, oldest first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vexport.records.accuracy import TaskVerdict, TextLimit
from vexport.records.values import Outcome

# Change of a result compared with the latest earlier result of the same side and setting.
# - first regression: it fails, and the earlier result passed or is an accepted baseline
# - passes again: it passes, and the earlier result failed
RowEvent = Literal["", "first regression", "passes again"]
RowKind = Literal["run", "accepted baseline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A setting with another value than in the row before of the same side and setting."""

    name: str
    was: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryTask:
    """One task of a row, or one measure of held-out text.

    `value` is the model's score. `verdict` has the change against the baseline, without documents.
    A measure of text has a `limit` instead. The tasks of an accepted baseline have neither.
    """

    name: str
    value: float | None = None
    verdict: TaskVerdict | None = None
    limit: TextLimit | None = None
    event: RowEvent = ""

    @property
    def outcome(self) -> Outcome | None:
        judged = self.verdict or self.limit
        return judged.outcome if judged is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """A side of a run in one setting, or an accepted baseline.

    - `name` is the name of the run, and of an accepted baseline the name of its file.
    - `folder` is the run directory or the file, as in the command.
    - `time` is the time of the evaluation or of the acceptance, empty if it was not recorded.
    - `setting` is the setting of a variant of `compare --serve` or of a scenario, else empty.
    - `checkpoint` is the name of the checkpoint, and `digest` the digest of its files. Either is
      empty if it was not recorded.
    - `vllm` is the version of vLLM.
    - `device` is the device that ran the model, or the server's address.
    - `baseline` is the name of the model or file that the row was compared with.
    - `outcome` is None if nothing was judged, as for accepted baselines.
    """

    schema: Literal["vexport.history/1"] = "vexport.history/1"
    name: str
    folder: str
    kind: RowKind = "run"
    time: str = ""
    setting: str = ""
    checkpoint: str = ""
    digest: str = ""
    schemes: str = ""
    num_bytes: int = 0
    vllm: str = ""
    device: str = ""
    baseline: str = ""
    outcome: Outcome | None = None
    reason: str = ""
    tasks: tuple[HistoryTask, ...] = ()
    event: RowEvent = ""
    changes: tuple[Change, ...] = ()

    @property
    def title(self) -> str:
        """Folder or file of the row, and its setting."""
        return f"{self.folder} ({self.setting})" if self.setting else self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Results of one model in time, oldest first."""

    rows: tuple[HistoryRow, ...]

    @property
    def name(self) -> str:
        """Name of the newest checkpoint that has a name."""
        return next((row.checkpoint for row in reversed(self.rows) if row.checkpoint), "one model")

    @property
    def decisive(self) -> HistoryRow | None:
        """Row with the gravest outcome of the newest run, or None without runs."""
        runs = [row for row in self.rows if row.kind == "run"]
        newest = [row for row in runs if row.folder == runs[-1].folder]
        return min(newest, key=_severity, default=None)

    @property
    def outcome(self) -> Outcome | None:
        """Outcome of the newest run, or None if there are only accepted baselines."""
        row = self.decisive
        return None if row is None else row.outcome or "INCONCLUSIVE"


def _severity(row: HistoryRow) -> int:
    severities: Sequence[Outcome | None] = ("FAIL", "INCONCLUSIVE", "PASS", None)
    return severities.index(row.outcome)
