"""The table of scores, which all results are read into and all judgements are made from.

A `ScoreTable` has one model's results: a `TaskTable` for each task, with a `Row` for each response.
The columns are the fields of `Row`: filter, document and seed, which together are the key, the
value of each metric, the ending, the digest of the question, and texts for reports. Whatever
belongs to a whole task or to a whole run stands once, in its `TaskTable` or `ScoreTable`.

The modules in `readers/` make these tables from the files of lm-eval, lighteval, EvalScope, JSON
lines and accepted baselines, one module for each. What a file does not contain is empty or None in
its table. An accepted baseline, for example, has no texts. `vexport.judge` pairs the rows of two
tables by their keys.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.inference.fingerprint import Fingerprint
from vexport.inference.questions import question_digest
from vexport.records import AcceptedBaseline, Json, Prompting
from vexport.records.chosen_metric import Choice
from vexport.records.margin import MarginSetting
from vexport.scores.endings import Ending
from vexport.scores.metrics import AGGREGATIONS, MetricKind, kind_of_metric, known_direction

if TYPE_CHECKING:
    from vexport.inference.repeated import Repeated

Key = tuple[str, int | str, int]
"""Filter, document id and seed of a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The response to a document, after a filter.

    - `scores` has the metrics with a number per document.
    - `values` has the stored values of all further metrics. lm-eval computes these metrics from the
      values of all documents at once.
    - `hashes` are the hashes of the document, the prompt and the target. An accepted baseline has
      only the digest of all three.
    - `ending` is the ending of a generated response.
    - `shown_text` is the text in reports: the raw response, or the chosen option.
    - `compared_text` is compared between models: the filtered response, or the chosen option. It is
      None if the response was not stored.
    - `options` is the number of options in a multiple-choice document, else 0.
    - `log_likelihood` is the logged value of a text that was scored instead of generated.
    """

    filter: str
    doc_id: int | str
    seed: int = 0
    scores: Mapping[str, float]
    values: Mapping[str, Json] = field(default_factory=dict)
    hashes: tuple[str, ...]
    ending: Ending | None = None
    prompt: str = ""
    target: str = ""
    shown_text: str
    compared_text: str | None
    options: int = 0
    log_likelihood: float | None = None

    @property
    def key(self) -> Key:
        return self.filter, self.doc_id, self.seed

    @property
    def number(self) -> int:
        """Number of the document. lm-eval's documents always have numbers."""
        assert isinstance(self.doc_id, int)
        return self.doc_id

    @property
    def digest(self) -> str:
        """Digest of the document, its prompt and its target."""
        return (
            self.hashes[0] if len(self.hashes) == 1 else question_digest(self.doc_id, self.hashes)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable:
    """All rows of a task by their keys, in the file's order.

    If several responses were sampled for a document, they have the seeds 0, 1, and so on. A single
    response has the seed 0. `higher_is_better`, `aggregations` and `aggregates` (by
    `metric,filter`) describe the metrics of the whole task. `higher_is_better` has only directions
    that the harness or the user stated. `aggregations` has the metrics in the task's configuration,
    with "" if it names no aggregation.
    `unscored` has the reasons why responses have no score, by document and seed. `larger` is an
    older results file with more documents of the task, or None. `full_size` is the number of
    documents in the whole data set, or None if it was not recorded. `fingerprint` has everything
    that could change the scores, by name.
    """

    task: str
    file: Path
    rows: Mapping[Key, Row]
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
    aggregations: Mapping[str, str] = field(default_factory=dict)
    aggregates: Mapping[str, float] = field(default_factory=dict)
    unscored: Mapping[tuple[int | str, int], str] = field(default_factory=dict)
    larger: Path | None = None
    full_size: int | None = None
    fingerprint: Fingerprint = field(default_factory=dict)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len({row.doc_id for row in self.rows.values()})

    @property
    def corpus_metrics(self) -> tuple[str, ...]:
        """Metrics without a number per document."""
        numbers = {name for row in self.rows.values() for name in row.scores}
        values = dict.fromkeys(name for row in self.rows.values() for name in row.values)
        return tuple(name for name in values if name not in numbers)

    def after(self, filter_name: str) -> list[Row]:
        """Return the rows after a filter."""
        return [row for row in self.rows.values() if row.filter == filter_name]

    def aggregation(self, metric: str) -> str | None:
        """Return the name of a metric's aggregation, None if it is unknown.

        For a Python function, the name is the source text of the function.
        """
        return self.aggregations.get(metric) or AGGREGATIONS.get(metric)

    def direction(self, metric: str) -> bool | None:
        """Return whether a higher aggregate is better, or None if nothing states it."""
        stated = self.higher_is_better.get(metric)
        return known_direction(metric) if stated is None else stated

    def metric_kind(self, metric: str, filter_name: str) -> MetricKind:
        """Return the direction and unit of a metric that all documents have."""
        rows = [row for row in self.after(filter_name) if not row.seed]
        return kind_of_metric(
            self.aggregation(metric),
            higher_is_better=self.direction(metric),
            values=[row.scores[metric] for row in rows],
            log_likelihoods=[row.log_likelihood for row in rows],
            aggregate=self.aggregates.get(f"{metric},{filter_name}"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTable:
    """Scores of one model, from the results of a `harness` or from an accepted baseline.

    - `file` is the newest results file, or the file of the accepted baseline.
    - `names` are the tasks and groups that can be selected, also if they were not.
    - `groups` maps each outermost group that lm-eval aggregates to the tasks in it and below it.
    - `members` maps every group to the tasks in it and below it.
    - `fingerprint` has everything that could change a score, by name. If files differ, it has the
      values of the newest file.
    - `prompting` has the settings of the prompts. It is None for other harnesses.
    - `replaced` are warnings about older files with more documents.
    - `warnings` describe likely mistakes in the settings of the prompts.
    - `measured_at` is the time at which lm-eval began, or "" if it was not recorded.
    - `repeated` counts responses that changed when the model ran again, or is None without repeats.
    - `identity`, `margin` and `gates` are those of an accepted baseline: what identifies it in
      verdicts, the acceptable loss of later candidates, and the deciding metrics.
    """

    file: Path
    tasks: Mapping[str, TaskTable]
    names: Collection[str]
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=dict)
    prompting: Prompting | None = None
    replaced: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    harness: str = "lm-eval"
    measured_at: str = ""
    repeated: "Repeated | None" = None
    identity: AcceptedBaseline | None = None
    margin: MarginSetting = None
    gates: Choice = field(default_factory=dict)

    def only(self, tasks: Collection[str]) -> "ScoreTable":
        """Return the scores of these tasks. A group keeps the tasks that are in it."""
        kept = set(tasks)
        groups = {
            name: tuple(member for member in members if member in kept)
            for name, members in self.groups.items()
        }
        return replace(
            self,
            tasks={name: task for name, task in self.tasks.items() if name in kept},
            groups={name: members for name, members in groups.items() if members},
        )

    def selected(self, names: Collection[str]) -> "ScoreTable":
        """Return the scores of tasks and groups by name, or all scores if there are no names.

        Names that are not in this table are ignored, because the other side of a verdict may have
        them. If only a part of a group is selected, its tasks stand alone. An accepted baseline is
        an exception: the part is judged by the metric and margin of the group.
        """
        if not names:
            return self
        tasks = {member for name in names for member in self.members.get(name, (name,))}
        if self.identity is not None:
            return self.only(tasks)
        whole = {name: members for name, members in self.groups.items() if tasks >= {*members}}
        return replace(self.only(tasks), groups=whole)
