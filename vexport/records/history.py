"""Records of a history: the results of one model in time, and the tasks that regressed."""

from dataclasses import dataclass, field
from typing import Literal

from vexport.records.accuracy import TaskVerdict, TextLimit

# Change of a task, or of a whole row, compared with earlier rows.
# - regressed: it fails, and the latest earlier row that can be compared passed
# - fails: it fails, and no earlier row that can be compared passed
# - still fails: it fails, and the latest earlier row that can be compared failed, too
# - passes again: it passes, and the latest earlier row that can be compared failed
RowEvent = Literal["", "regressed", "fails", "still fails", "passes again"]
RowKind = Literal["run", "accepted baseline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryTask:
    """One task of a row, or one measure of held-out text.

    `value` is the model's score. `verdict` has the change against the baseline, without documents.
    For a measure of text, `limit` has the change and `value` is None. In the row of an accepted
    baseline, `verdict` and `limit` are None. `event` compares the task with earlier rows.
    `incomparable_reasons` (`apart` in JSON) lists the reasons why the task cannot be compared with
    its latest earlier result, such as other documents, another baseline or another margin.
    """

    name: str
    metric: str = ""
    filter: str = ""
    documents: int | None = None
    value: float | None = None
    verdict: TaskVerdict | None = None
    limit: TextLimit | None = None
    event: RowEvent = ""
    incomparable_reasons: tuple[str, ...] = field(default=(), metadata={"alias": "apart"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RowHistory:
    """Place of a result in the history of its model.

    - `time` is the time of the evaluation or of the acceptance, empty if it was not recorded.
    - `setting` is the setting of a variant of `compare --serve`, else empty.
    - `checkpoint` is the name of the checkpoint, and `digest` the digest of its files. Either is
      empty if it was not recorded. `checkpoint_before` is the digest or the name in the row before
      if the checkpoint changed.
    - `vllm` is the version of vLLM. `vllm_before` is the version in the row before if it changed.
    - `device` is the device that ran the model, or the server's address.
    - `baseline` is the name of the model or file that the row was compared with. `baseline_digest`
      is the digest of this model's files, or of the accepted baseline.
    - `judged_against` is the accepted baseline with which the responses were compared for this
      history. It is empty if the row has the verdict that the run stored.
    - `loads` is False if the checkpoint failed to load or failed its check, and None if unknown.
    - `is_first_regression` marks the first row that regressed.
    - `notes` are sentences below the table, for example why rows cannot be compared.
    """

    kind: RowKind
    time: str = ""
    setting: str = ""
    checkpoint: str = ""
    digest: str = ""
    checkpoint_before: str = ""
    vllm: str = ""
    vllm_before: str = ""
    device: str = ""
    baseline: str = ""
    baseline_digest: str = ""
    judged_against: str = ""
    loads: bool | None = None
    tasks: tuple[HistoryTask, ...] = ()
    event: RowEvent = ""
    is_first_regression: bool = False
    notes: tuple[str, ...] = ()
