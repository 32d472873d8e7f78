"""Pair two models' responses to the same documents, by task, metric and filter.

The outcome of a task depends on one pair. A group with an aggregate in lm-eval counts as one task.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from vexport.errors import InputError, raise_all
from vexport.errors.extras import attempt_all, require_extra
from vexport.foreign import LARGEST_SCORE
from vexport.inference.questions import HASHES
from vexport.judge.corpus import CorpusComparison, compare_corpora
from vexport.judge.statistics import MIN_CLUSTERS, Clusters
from vexport.records.chosen_metric import Choice, direction_name, parse_chosen_metric
from vexport.records.margin import EVERY_TASK, Unit
from vexport.rules import baseline as baseline_rules
from vexport.rules import margin as margin_rules
from vexport.rules import pairs as rules
from vexport.scores.aggregates import (
    NEEDS_SACREBLEU,
    CorpusTable,
    NotReadable,
    Scores,
    log_likelihood_table,
    tabulate,
)
from vexport.scores.metrics import WHOLE_CORPUS, is_no_share
from vexport.scores.settings import changed_settings
from vexport.scores.table import Row, ScoreTable, TaskTable

PREFERRED_METRICS = ("exact_match", "acc", "pass@1", "pass_at_1")
"""The first of these metrics that a task has is the metric that decides.

`acc` is preferred to `acc_norm`, because the task itself scores with `acc`.

If a task has none of these metrics, its first metric of the first available kind decides:

- metrics that are 0 or 1 for each document
- other metrics with a number per document, except log-likelihoods
- log-likelihoods, and metrics of the whole corpus

Within a kind, metrics for which higher is better come first. If a metric has several filters, the
task's first filter is used.
"""
# Metrics of lm-eval with a value from 0 to 1 for each document.
SHARES = frozenset(("acc", "acc_norm", "acc_bytes", "exact_match"))
# Maximum relative difference between a recorded aggregate and the same aggregate computed here.
_TOLERANCE = 1e-6
# Number of characters of each prompt that a message shows, from the first difference on.
_SHOWN = 40


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskPair:
    """Both models' scores on a task, metric and filter, in the same order of responses.

    - `documents` has a pair of samples (baseline, candidate) for each response.
    - `baseline` and `candidate` have the shape (responses,). For a metric of the whole corpus, they
      have each response's contribution to the metric, in units of `own_unit`.
    - `sign` is -1 if lower is better. `direction_assumed` is True if nothing states the direction.
    - `clusters`, of the same shape, has the number of each response's cluster, or is None without
      clusters. Clusters are the tasks of a group, or the documents if `seeds` responses were
      sampled for each document.
    - `informational` lists the pairs that reports show but that do not decide: the other metrics
      and filters of the task or group, and the tasks of a group.
    - `own_unit` is the unit of a metric that is never a share, for example a log-likelihood in nats
      or a metric of the whole corpus. It is None for other metrics, because their unit depends on
      the values.
    - `corpus` is the comparison by a metric of the whole corpus, or None for other metrics.
    - `parts` are the pairs of the single tasks if the pair joins several tasks.
    - `undecided` is the reason why the metric cannot decide, or empty if it can.
    - `available` is the number of documents in the whole task or group, or None if unknown.
    """

    task: str
    metric: str
    filter: str
    sign: int
    documents: tuple[tuple[Row, Row], ...]
    baseline: Scores
    candidate: Scores
    clusters: Clusters | None = None
    informational: tuple["TaskPair", ...] = ()
    own_unit: Unit | None = None
    corpus: CorpusComparison | None = None
    parts: tuple["TaskPair", ...] = ()
    undecided: str = ""
    available: int | None = None
    direction_assumed: bool = False

    @cached_property
    def seeds(self) -> int:
        """Number of responses to each document."""
        return 1 + max(row.seed for row, _ in self.documents)

    @property
    def unit(self) -> Unit:
        """Return the metric's own unit, else `share` if all values are shares, else `metric`."""
        if self.own_unit is not None:
            return self.own_unit
        values = np.concatenate([self.baseline, self.candidate])
        is_share = not is_no_share(self.metric) and bool(((values >= 0) & (values <= 1)).all())
        return "share" if is_share else "metric"

    @property
    def label(self) -> str:
        """`metric,filter`, as in a `Choice`."""
        return f"{self.metric},{self.filter}"

    @property
    def binary(self) -> bool:
        """True if each document is either right (1) or wrong (0)."""
        if self.own_unit is not None:
            return False
        sides = (self.baseline, self.candidate)
        return all(bool(((side == 0) | (side == 1)).all()) for side in sides)

    @property
    def chance(self) -> float:
        """Share of correct responses expected from guessing an option, or 0 without options."""
        return sum(1 / new.options for _, new in self.documents if new.options) / len(
            self.documents
        )

    @property
    def gain(self) -> Scores:
        """Candidate's score minus baseline's for each response. Positive is better."""
        return self.sign * (self.candidate - self.baseline)

    @property
    def changed(self) -> Scores:
        """Change of each response: positive if it got better, 0 if its score is the same.

        For a metric of the whole corpus, it is the change of the metric if only this response
        changes.
        """
        if self.corpus is not None:
            return self.corpus.changes
        if self.is_joined_corpus:
            return np.concatenate([part.changed for part in self.parts])
        return self.gain

    @property
    def scored(self) -> Scores | None:
        """1 for each response that is at least partly correct, else 0, shape (2, responses).

        It is None unless the metric is of the whole corpus.
        """
        if self.corpus is not None:
            return self.corpus.scored
        parts = [part.scored for part in self.parts if part.scored is not None]
        return np.concatenate(parts, axis=1) if self.is_joined_corpus else None

    def to_aggregate(self, value: float) -> float:
        """Convert a mean of scores to the reported value.

        For a perplexity, the mean is a log-likelihood.
        """
        if self.corpus is not None:
            return self.corpus.table.to_aggregate(value)
        return self.parts[0].to_aggregate(value) if self.parts else value

    @property
    def wins(self) -> int:
        """Number of responses that got better."""
        return int((self.changed > 0).sum())

    @property
    def losses(self) -> int:
        """Number of responses that got worse."""
        return int((self.changed < 0).sum())

    @property
    def baseline_value(self) -> float:
        """Baseline's value of the metric, as lm-eval aggregates it."""
        return (
            self.corpus.reported[0]
            if self.corpus
            else self.to_aggregate(float(self.baseline.mean()))
        )

    @property
    def candidate_value(self) -> float:
        """Candidate's value of the metric, as lm-eval aggregates it."""
        return (
            self.corpus.reported[1]
            if self.corpus
            else self.to_aggregate(float(self.candidate.mean()))
        )

    @property
    def difference(self) -> float:
        """Candidate's value minus baseline's, in the unit of a difference. Positive is better."""
        if self.corpus is None:
            return float(self.gain.mean())
        baseline, candidate = self.corpus.values
        return self.sign * (candidate - baseline) + 0.0

    @property
    def range_width(self) -> float:
        """Size of the largest change of a response: the width of the metric's range, at least 1.

        For a metric of the whole corpus, it is the size of a typical change.
        """
        if self.corpus is not None:
            return self.corpus.change_size
        if self.is_joined_corpus:
            return max(part.range_width for part in self.parts)
        return max(1.0, float(np.ptp(np.concatenate([self.baseline, self.candidate]))))

    @property
    def responses_per_cluster(self) -> int:
        """Number of responses per cluster if clusters are documents, else 1."""
        if self.clusters is None:
            return 1
        return self.seeds if len(np.unique(self.clusters)) * self.seeds == len(self.gain) else 1

    @property
    def is_joined_corpus(self) -> bool:
        """True if the pair joins several tasks that each have a metric of the whole corpus."""
        return bool(self.parts) and all(part.corpus is not None for part in self.parts)

    @property
    def key(self) -> tuple[str, str, int, Unit | None]:
        """Metric, filter, sign and own unit. Only pairs with equal keys can be joined."""
        return self.metric, self.filter, self.sign, self.own_unit


def gated_tasks(
    baseline: ScoreTable, candidate: ScoreTable, choice: Choice
) -> tuple[TaskPair, ...]:
    """Return the deciding pair of each task. Both tables have the same tasks.

    A group with an aggregate in lm-eval counts as one task.

    `choice` names metrics that decide instead of PREFERRED_METRICS.

    Raises:
        InputError: If the runs have different documents, if a task has no metric that can decide,
        or if no task has the chosen metric. The error lists the problems of all tasks.
    """
    if baseline.identity is not None:
        baseline, candidate = _with_accepted_questions(baseline, candidate)
    units = dict(_tasks_and_groups(baseline))
    raise_all([*unknown_names("gate", choice, [*units])])
    baseline, candidate = with_directions(baseline, candidate, units, choice)
    choice = {name: parse_chosen_metric(text).label for name, text in choice.items()}
    compared = [
        partial(_metric_pairs, name, members, baseline, candidate)
        for name, members in units.items()
    ]
    by_name = dict(zip(units, attempt_all(zip(units, compared, strict=True)), strict=True))
    everywhere = choice.get(EVERY_TASK)
    pairs = [pair for metrics in by_name.values() for pair in metrics]
    if everywhere and not any(
        everywhere in (pair.metric, pair.label) for pair in pairs if not pair.undecided
    ):
        members = [name for names in units.values() for name in names]
        raise _no_such_gate("gate", everywhere, pairs, baseline, members)
    for name, metrics in by_name.items():
        wanted, options = choice.get(name), [pair for pair in metrics if pair.task == name]
        if wanted and not any(
            wanted in (pair.metric, pair.label) for pair in options if not pair.undecided
        ):
            raise _no_such_gate(f"gate of task {name}", wanted, options, baseline, units[name])
    gates = {
        name: _deciding_pair(name, metrics, choice.get(name) or everywhere)
        for name, metrics in by_name.items()
    }
    return tuple(
        replace(gate, available=_available(units[name], baseline)) for name, gate in gates.items()
    )


def _with_accepted_questions(
    baseline: ScoreTable, candidate: ScoreTable
) -> tuple[ScoreTable, ScoreTable]:
    """Return an accepted baseline with all columns that it lacks, and the rows to pair with it.

    The questions are the same, so these columns are the candidate's.

    Raises:
        InputError: If a document is missing in one of the two, or if a question differs. The error
        names all tasks with such a problem.
    """
    where = str(candidate.file)
    pairs = attempt_all(
        (where, partial(_accepted_and_now, where, old, candidate.tasks[name]))
        for name, old in baseline.tasks.items()
    )
    old, new = ({side.task: side for side in sides} for sides in zip(*pairs, strict=True))
    return replace(baseline, tasks=old), replace(candidate, tasks=new)


def _accepted_and_now(where: str, old: TaskTable, now: TaskTable) -> tuple[TaskTable, TaskTable]:
    where = f"{where}: task {old.task}"
    accepted = {row.doc_id: row for row in old.rows.values()}
    first = next(iter(accepted.values()))
    (metric,) = first.scores
    rows = sorted(now.after(first.filter), key=lambda row: row.number)
    complete = all(metric in row.scores and row.doc_id in accepted for row in rows)
    if not complete or not rows or len(rows) != len(accepted):
        raise InputError.of(
            baseline_rules.OTHER_DOCUMENTS,
            where,
            count=len(rows),
            metric=f"{metric},{first.filter}",
            accepted=len(accepted),
            older=_older(now) if len(rows) < len(accepted) else "",
        )
    for row in rows:
        if accepted[row.doc_id].digest != row.digest:
            changed = changed_settings(old.fingerprint, now.fingerprint, old.task)
            reason = f"since it was accepted, changed: {', '.join(changed) or 'nothing known'}"
            place = f"{where}, document {row.doc_id}"
            raise InputError.of(baseline_rules.OTHER_QUESTION, place, reason=reason)
    now = replace(now, rows={row.key: row for row in rows})
    kept = {row.key: _with_question_of(row, accepted[row.doc_id]) for row in rows}
    return replace(now, rows=kept, higher_is_better=old.higher_is_better, aggregates={}), now


def _with_question_of(row: Row, accepted: Row) -> Row:
    return replace(
        row,
        scores=accepted.scores,
        ending=accepted.ending,
        shown_text=accepted.shown_text,
        compared_text=None,
    )


def with_directions(
    baseline: ScoreTable, candidate: ScoreTable, units: Mapping[str, Sequence[str]], choice: Choice
) -> tuple[ScoreTable, ScoreTable]:
    """Return both results with the directions that `choice` states.

    `units` maps each task or group to its tasks.

    Raises:
        InputError: If a harness recorded another direction.
    """
    stated: dict[str, dict[str, bool]] = {}
    problems: list[InputError] = []
    for name, text in choice.items():
        chosen = parse_chosen_metric(text)
        if chosen.higher_is_better is None:
            continue
        members = [*baseline.tasks] if name == EVERY_TASK else units[name]
        for member in members:
            stated.setdefault(member, {})[chosen.metric] = chosen.higher_is_better
            sides = (each.tasks[member].higher_is_better for each in (baseline, candidate))
            if (not chosen.higher_is_better) in (side.get(chosen.metric) for side in sides):
                recorded = direction_name(not chosen.higher_is_better)
                where = "gate" if name == EVERY_TASK else f"gate of task {name}"
                problems.append(
                    InputError.of(
                        margin_rules.DIRECTION,
                        where,
                        gate=text,
                        metric=chosen.metric,
                        recorded=recorded,
                        task=member,
                    )
                )
                break
    raise_all(problems)
    left, right = (_with_stated(each, stated) for each in (baseline, candidate))
    return left, right


def _with_stated(results: ScoreTable, stated: Mapping[str, Mapping[str, bool]]) -> ScoreTable:
    tasks = {
        name: replace(task, higher_is_better={**task.higher_is_better, **stated.get(name, {})})
        for name, task in results.tasks.items()
    }
    return replace(results, tasks=tasks) if stated else results


def _available(members: Sequence[str], results: ScoreTable) -> int | None:
    """Return the number of documents in these whole tasks, or None if it was not recorded."""
    sizes = [results.tasks[member].full_size for member in members]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _no_such_gate(
    where: str, wanted: str, pairs: Sequence[TaskPair], results: ScoreTable, members: Sequence[str]
) -> InputError:
    """Build the error for a chosen metric that the tasks do not have, or that cannot decide.

    Raises:
        MissingPackage: If the metric needs sacrebleu and it is not installed.
    """
    unable = [
        pair.undecided for pair in pairs if pair.undecided and wanted in (pair.metric, pair.label)
    ]
    metric = wanted.partition(",")[0]
    _require_sacrebleu([metric], results, members)
    if any(metric in results.tasks[member].corpus_metrics for member in members):
        unable.append(WHOLE_CORPUS)
    labels = dict.fromkeys(pair.label for pair in pairs if not pair.undecided)
    return no_such_metric(where, wanted, [*labels], *unable[:1])


def no_such_metric(where: str, metric: str, known: Sequence[str], reason: str = "") -> InputError:
    """Return the error that the tasks have no such metric, or that it cannot decide."""
    reason = f" ({reason})" if reason else ""
    return InputError.of(margin_rules.NO_METRIC, where, metric=metric, reason=reason, known=known)


def unknown_names(where: str, given: Iterable[str], names: Sequence[str]) -> Iterator[InputError]:
    """Yield an error for each name in `given` that is not the name of a task.

    `names` are the names of the tasks, and of the groups that count as a task.
    """
    for name in given:
        if name not in (*names, EVERY_TASK):
            yield InputError.of(margin_rules.NO_TASK, where, name=name, names=names)


def _tasks_and_groups(results: ScoreTable) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (name, tasks) for lm-eval's groups, then for the tasks outside of groups.

    If two groups share a task, only the first group is used.
    """
    done: set[str] = set()
    for group, members in results.groups.items():
        if not done & set(members):
            done |= set(members)
            yield group, members
    yield from ((name, (name,)) for name in results.tasks if name not in done)


def _metric_pairs(
    name: str, members: Sequence[str], baseline: ScoreTable, candidate: ScoreTable
) -> list[TaskPair]:
    """Return the pairs of every metric of a task.

    For a group, return the pairs of the whole group first, then the pairs of its tasks.
    """
    pairs = [
        list(
            pair_metrics(
                baseline.tasks[member],
                candidate.tasks[member],
                changed=changed_settings(
                    baseline.tasks[member].fingerprint, candidate.tasks[member].fingerprint, member
                ),
            )
        )
        for member in members
    ]
    metrics = [pair for member in pairs for pair in member]
    if tuple(members) != (name,):
        same = [[pair for pair in metrics if pair.key == first.key] for first in pairs[0]]
        metrics = [*(join_group(name, each) for each in same if len(each) == len(pairs)), *metrics]
    able = [pair for pair in metrics if not pair.undecided]
    if any(pair.task == name for pair in able):
        return metrics
    corpus = dict.fromkeys(m for member in members for m in baseline.tasks[member].corpus_metrics)
    for member in members:
        _require_sacrebleu(baseline.tasks[member].corpus_metrics, baseline, [member])
    found = "no metric that all its tasks share"
    if not able:
        listed = [f"{pair.metric} ({pair.undecided})" for pair in metrics if pair.task == name]
        named = ", ".join(dict.fromkeys((*listed, *corpus)))
        if not named:
            new, old = (_metric_names(side, members) for side in (candidate, baseline))
            named = f"{new}; the baseline has {old}"
        found = f"no metric that decides ({named})"
    raise InputError.of(rules.NO_SCORE, f"{baseline.file}: task {name}", found=found)


def _metric_names(results: ScoreTable, members: Sequence[str]) -> str:
    rows = [row for member in members for row in results.tasks[member].rows.values()]
    return ", ".join(sorted({name for row in rows for name in (*row.scores, *row.values)}))


def _require_sacrebleu(metrics: Sequence[str], results: ScoreTable, members: Sequence[str]) -> None:
    for member in members:
        task = results.tasks[member]
        for metric in set(metrics) & set(task.corpus_metrics):
            if task.aggregation(metric) in NEEDS_SACREBLEU:
                require_extra("sacrebleu", f"task {member}: the metric {metric}")


def _deciding_pair(name: str, metrics: Sequence[TaskPair], wanted: str | None) -> TaskPair:
    """Return the pair of the chosen metric, else of the preferred metric.

    The other pairs are in `informational`.
    """
    options = [pair for pair in metrics if pair.task == name and not pair.undecided]
    chosen = [pair for pair in options if wanted in (pair.metric, pair.label)]
    gate = chosen[0] if chosen else min(options, key=_preference)
    rest = (
        pair for pair in metrics if pair is not gate and (pair.task == name or pair.key == gate.key)
    )
    return replace(gate, informational=tuple(rest))


def _preference(pair: TaskPair) -> tuple[int, bool, bool, bool]:
    is_preferred = pair.metric in PREFERRED_METRICS
    rank = PREFERRED_METRICS.index(pair.metric) if is_preferred else len(PREFERRED_METRICS)
    return rank, pair.own_unit is not None, not pair.binary, pair.sign < 0


def pair_metrics(
    left: TaskTable, right: TaskTable, *, changed: Sequence[str] = ()
) -> Iterator[TaskPair]:
    """Yield a pair for every (metric, filter) of a task.

    A direction that only one of the two runs states applies to both.

    Metrics with a number per document come first, in the task's order. Metrics of the whole corpus
    follow if their aggregation is known.

    Raises:
        InputError: If the prompts of the two runs differ. The error names the document and the
        settings that `changed`.
    """
    both = {**right.higher_is_better, **left.higher_is_better}
    for metric, direction in right.higher_is_better.items():
        require_same_direction(f"{right.file}: task {left.task}", metric, both[metric], direction)
    left, right = replace(left, higher_is_better=both), replace(right, higher_is_better=both)
    right = _with_ids_of(left, right)
    _require_equal_documents(left, right, ", ".join(changed) or "nothing known")
    for filter_name in dict.fromkeys(key[0] for key in left.rows):
        pairs = tuple(
            (row, right.rows[key]) for key, row in left.rows.items() if key[0] == filter_name
        )
        for metric in pairs[0][0].scores:
            if all(metric in x.scores and metric in y.scores for x, y in pairs):
                yield _pair(left, right, metric, pairs)
        for metric in pairs[0][0].values:
            try:
                yield _corpus_pair(left, right, metric, pairs)
            except NotReadable:
                continue  # the metric stays in `corpus_metrics`


def join_group(name: str, pairs: Sequence[TaskPair]) -> TaskPair:
    """Join the documents of a group's tasks into a single pair.

    Documents are clustered by task if the group has at least MIN_CLUSTERS tasks.
    """
    by_task = np.repeat(np.arange(len(pairs)), [len(pair.gain) for pair in pairs])
    return _join(name, pairs, by_task) if len(pairs) >= MIN_CLUSTERS else pool(name, pairs)


def pool(name: str, pairs: Sequence[TaskPair]) -> TaskPair:
    """Join the documents of all tasks into a single pair.

    Clusters are kept. If a pair has no clusters, each of its documents becomes a cluster.
    """
    if all(pair.clusters is None for pair in pairs):
        return _join(name, pairs, None)
    parts = [
        np.arange(len(pair.gain)) if pair.clusters is None else pair.clusters for pair in pairs
    ]
    starts = np.cumsum([0, *(int(part.max()) + 1 for part in parts[:-1])])
    clusters = np.concatenate([part + start for part, start in zip(parts, starts, strict=True)])
    return _join(name, pairs, clusters)


def _join(name: str, pairs: Sequence[TaskPair], clusters: Clusters | None) -> TaskPair:
    """Join the documents of several pairs into a single pair.

    For metrics of a whole corpus, the scores are the responses' contributions to the metric of
    their own task. Their mean is the mean of the tasks' values, weighted by the size of the tasks.
    This is lm-eval's aggregate of a group with `weight_by_size`. Perplexities are an exception: the
    mean is a log-likelihood, so the group's perplexity is the geometric mean of the tasks'
    perplexities.
    """
    return replace(
        pairs[0],
        task=name,
        documents=tuple(document for pair in pairs for document in pair.documents),
        baseline=np.concatenate([pair.baseline for pair in pairs]),
        candidate=np.concatenate([pair.candidate for pair in pairs]),
        corpus=None,
        parts=tuple(pairs),
        undecided=next((pair.undecided for pair in pairs if pair.undecided), ""),
        clusters=clusters,
        informational=(),
    )


def _with_ids_of(left: TaskTable, right: TaskTable) -> TaskTable:
    """Replace the document ids of `right` by the ids of the same documents (`doc_hash`) in `left`.

    lm-eval writes wrong ids if the ids in `--samples` are not in ascending order. `right` is
    returned unchanged if the ids agree, or if the two runs have different documents.

    Raises:
        InputError: If the ids differ and two documents of a run are equal, so that they cannot be
        paired.
    """
    old, new = _by_content(left), _by_content(right)
    shifted = old.keys() == new.keys() and any(
        key not in left.rows or left.rows[key].hashes[0] != row.hashes[0]
        for key, row in right.rows.items()
    )
    if not shifted:
        return right
    if any(len(rows) > 1 for rows in (*old.values(), *new.values())):
        return right
    renumbered = (replace(new[key][0], doc_id=samples[0].doc_id) for key, samples in old.items())
    return replace(right, rows={row.key: row for row in renumbered})


def _by_content(task: TaskTable) -> dict[tuple[str, str, int], list[Row]]:
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in task.rows.values():
        found.setdefault((row.filter, row.hashes[0], row.seed), []).append(row)
    return found


def _require_equal_documents(left: TaskTable, right: TaskTable, changed: str) -> None:
    for first, other in ((left, right), (right, left)):
        lost = [key for key in first.rows if key not in other.rows]
        if lost:
            filter_name, doc_id, seed = lost[0]
            which = f"response {seed} to document {doc_id}" if seed else f"document {doc_id}"
            which += f" (filter {filter_name})"
            if reason := other.unscored.get((doc_id, seed)):
                which = f"score of {which}: {reason}"
            raise InputError.of(
                rules.MISSING_DOCUMENTS,
                f"{other.file}: task {first.task}",
                document=which,
                count=len(lost),
                file=first.file,
                older=_older(other),
            )
    for key, row in left.rows.items():
        twin = right.rows[key]
        for hash_name, ours, theirs in zip(HASHES, row.hashes, twin.hashes, strict=True):
            if ours != theirs:
                where = f"{right.file}: task {left.task}, document {row.doc_id}"
                prompts = (
                    _first_difference(row.prompt, twin.prompt) if hash_name == "prompt_hash" else ""
                )
                differ = prompts or f"{hash_name} {theirs[:12]}, the baseline has {ours[:12]}"
                raise InputError.of(rules.OTHER_QUESTION, where, difference=differ, changed=changed)


def _older(task: TaskTable) -> str:
    """Return the file of older results with more documents, as words in brackets."""
    return f" ({task.larger}, which is older, has more)" if task.larger is not None else ""


def require_same_direction(
    where: str, metric: str, baseline: bool | None, candidate: bool | None
) -> None:
    """Raise InputError if higher is better in one of the two results, and lower in the other."""
    if None not in (baseline, candidate) and baseline != candidate:
        raise InputError.of(rules.OTHER_DIRECTION, where, metric=metric)


def _first_difference(ours: str, theirs: str) -> str:
    """Describe the first difference of two prompts. Return "" if they are equal."""
    if ours == theirs:
        return ""
    at = next(
        (i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y),
        min(len(ours), len(theirs)),
    )
    old, new = (repr(text[at : at + _SHOWN]) for text in (ours, theirs))
    return f"a prompt that continues after {at} characters with {new}, the baseline's with {old}"


def _pair(
    task: TaskTable, other: TaskTable, metric: str, pairs: tuple[tuple[Row, Row], ...]
) -> TaskPair:
    left, right = (
        np.array([pair[side].scores[metric] for pair in pairs], dtype=np.float64) for side in (0, 1)
    )
    low, high = np.minimum(left, right), np.maximum(left, right)
    size = np.maximum(np.abs(left), np.abs(right))  # NaN if a score is NaN
    wrong = ~(size <= LARGEST_SCORE)
    if metric in SHARES:
        wrong |= (low < 0) | (high > 1)
    if wrong.any():
        index = int(wrong.argmax())
        raise InputError.of(
            rules.SCORE,
            f"{task.file}: task {task.task}, document {pairs[index][0].doc_id}",
            metric=metric,
            baseline=left[index],
            candidate=right[index],
            most=LARGEST_SCORE,
        )
    kind, other_kind = (each.metric_kind(metric, pairs[0][0].filter) for each in (task, other))
    pair = TaskPair(
        task=task.task,
        metric=metric,
        filter=pairs[0][0].filter,
        sign=1 if kind.higher_is_better else -1,
        documents=pairs,
        baseline=left,
        candidate=right,
        clusters=_documents_as_clusters(pairs),
        undecided=kind.undecided or other_kind.undecided,
        direction_assumed=kind.is_assumed,
    )
    if not kind.in_nats and not other_kind.in_nats:
        return pair
    in_nats = kind if kind.in_nats else other_kind
    table = log_likelihood_table(
        left, right, higher_is_better=in_nats.higher_is_better, is_perplexity=in_nats.is_perplexity
    )
    try:
        return _with_corpus(replace(pair, undecided="", direction_assumed=False), table)
    except NotReadable as error:
        sign = 1 if table.higher_is_better else -1
        return replace(pair, sign=sign, own_unit=table.unit, undecided=str(error))


def _documents_as_clusters(pairs: Sequence[tuple[Row, Row]]) -> Clusters | None:
    """Return the document's number for each response.

    Return None if each document has a single response.
    """
    if not any(row.seed for row, _ in pairs):
        return None
    return np.unique([row.doc_id for row, _ in pairs], return_inverse=True)[1]


def _corpus_pair(
    task: TaskTable, other: TaskTable, metric: str, pairs: tuple[tuple[Row, Row], ...]
) -> TaskPair:
    """Return the pair of a metric that lm-eval computes from all documents at once.

    Raises:
        NotReadable: If the aggregation is unknown, or some documents lack the metric. Also if the
        stored values do not fit the aggregation, or lm-eval recorded another result.
    """
    if not all(metric in old.values and metric in new.values for old, new in pairs):
        raise NotReadable("some documents do not have the metric")
    aggregation = task.aggregation(metric)
    if aggregation is None or aggregation != other.aggregation(metric):
        raise NotReadable("its aggregation is unknown")
    table = tabulate(
        aggregation,
        metric,
        [old.values[metric] for old, _ in pairs],
        [new.values[metric] for _, new in pairs],
    )
    pair = TaskPair(
        task=task.task,
        metric=metric,
        filter=pairs[0][0].filter,
        sign=1,
        documents=pairs,
        baseline=np.zeros(len(pairs)),
        candidate=np.zeros(len(pairs)),
        clusters=_documents_as_clusters(pairs),
    )
    pair = _with_corpus(pair, table)
    if pair.seeds == 1:
        for side, value in ((task, pair.baseline_value), (other, pair.candidate_value)):
            _require_recorded(side, metric, pair.filter, value)
    return pair


def _with_corpus(pair: TaskPair, table: CorpusTable) -> TaskPair:
    """Return the pair with scores that are the responses' contributions to a metric of the corpus.

    Raises:
        NotReadable: If the metric cannot be computed after a document is left out.
    """
    corpus = compare_corpora(table, pair.clusters)
    return replace(
        pair,
        sign=1 if table.higher_is_better else -1,
        baseline=corpus.influence[0],
        candidate=corpus.influence[1],
        own_unit=table.unit,
        corpus=corpus,
    )


def _require_recorded(task: TaskTable, metric: str, filter_name: str, value: float) -> None:
    """Raise NotReadable if lm-eval recorded another value of the metric.

    The check runs only if the task's configuration does not list the metric. Then the task may be
    Python code with another aggregation for a metric of the same name.
    """
    recorded = task.aggregates.get(f"{metric},{filter_name}")
    if metric in task.aggregations or recorded is None:
        return
    if not math.isclose(recorded, value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
        raise NotReadable(f"lm-eval recorded {recorded}, and its documents give {value}")
