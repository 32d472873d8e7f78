"""Pairs two models' answers to the same documents, and picks the metric that decides for each task."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from vexport.errors import InputError
from vexport.evaluation.samples import HASHES, Results, Sample, TaskSamples
from vexport.evaluation.statistics import Scores

PREFERRED_METRICS = ("exact_match", "acc", "pass@1", "pass_at_1")
"""What gates where a task has it, in this order: `acc` rather than `acc_norm`, as the task itself scores.

Then comes the first metric of only 0 and 1 with higher being better, then any of one number a document.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskPair:
    """Both models' scores on one task, metric and filter, in the same order of documents.

    `baseline` and `candidate` have the shape (documents,); `sign` is -1 where lower is better.
    """

    task: str
    metric: str
    filter: str
    sign: int
    documents: tuple[tuple[Sample, Sample], ...]
    baseline: Scores
    candidate: Scores

    @property
    def binary(self) -> bool:
        """Whether each document is either right (1) or wrong (0)."""
        return bool(np.isin(self.baseline, (0, 1)).all() and np.isin(self.candidate, (0, 1)).all())

    @property
    def gain(self) -> Scores:
        """How much better the candidate is on each document."""
        return self.sign * (self.candidate - self.baseline)


def pair_metrics(baseline: Results, candidate: Results) -> Iterator[TaskPair]:
    """Yield every (task, metric, filter) that has one number a document.

    InputError names the task and the document where the two runs did not answer the same question.
    """
    _require_equal_tasks(baseline, candidate)
    for name, left in baseline.tasks.items():
        right = candidate.tasks[name]
        _require_equal_documents(left, right)
        for filter_name in dict.fromkeys(key[0] for key in left.samples):
            pairs = tuple(
                (sample, right.samples[key]) for key, sample in left.samples.items() if key[0] == filter_name
            )
            for metric in _common_metrics(pairs):
                yield _pair(left, metric, pairs)


def gating_pairs(baseline: Results, candidate: Results) -> tuple[TaskPair, ...]:
    """The pair that decides for each task; a group with an aggregate in lm-eval counts as one task.

    The metric is chosen by PREFERRED_METRICS, the filter is the first that the task lists.
    """
    pairs = list(pair_metrics(baseline, candidate))
    chosen: dict[str, TaskPair] = {}
    for name, task in baseline.tasks.items():
        choices = [pair for pair in pairs if pair.task == name]
        if not choices:
            fix = "give a task with a metric for each document, such as acc or exact_match"
            got = "metrics of the whole corpus only"
            raise InputError(f"{task.file}: task {name}", got=got, need="one number a document", fix=fix)
        chosen[name] = min(choices, key=_preference)
    return tuple(_join_groups(chosen, baseline.groups))


def _preference(pair: TaskPair) -> tuple[int, bool, bool]:
    known = pair.metric in PREFERRED_METRICS
    rank = PREFERRED_METRICS.index(pair.metric) if known else len(PREFERRED_METRICS)
    return rank, not pair.binary, pair.sign < 0


def _require_equal_tasks(baseline: Results, candidate: Results) -> None:
    for one, other in ((baseline, candidate), (candidate, baseline)):
        if missing := sorted(set(one.tasks) - set(other.tasks)):
            got = f"no task {', '.join(missing)}, which {one.file} has"
            raise InputError(str(other.file), got=got, need="the same tasks", fix="evaluate the same tasks")


def _require_equal_documents(left: TaskSamples, right: TaskSamples) -> None:
    for one, other in ((left, right), (right, left)):
        lost = [key for key in one.samples if key not in other.samples]
        if lost:
            filter_name, doc_id = lost[0]
            got = f"no document {doc_id} (filter {filter_name}), {len(lost)} missing in all"
            fix = f"evaluate the documents of {one.file}, with the same --limit"
            raise InputError(f"{other.file}: task {one.task}", got=got, need="the same documents", fix=fix)
    for key, sample in left.samples.items():
        twin = right.samples[key]
        for hash_name, ours, theirs in zip(HASHES, sample.hashes, twin.hashes, strict=True):
            if ours != theirs:
                place = f"{right.file}: task {left.task}, document {sample.doc_id}"
                got = f"{hash_name} {theirs[:12]}, the baseline has {ours[:12]}"
                fix = "evaluate both with the same lm-eval, task files, few-shot seed and chat template"
                raise InputError(place, got=got, need="the same question", fix=fix)


def _common_metrics(pairs: tuple[tuple[Sample, Sample], ...]) -> list[str]:
    first = pairs[0][0].scores
    return [name for name in first if all(name in x.scores and name in y.scores for x, y in pairs)]


def _pair(task: TaskSamples, metric: str, pairs: tuple[tuple[Sample, Sample], ...]) -> TaskPair:
    left, right = (
        np.array([pair[side].scores[metric] for pair in pairs], dtype=np.float64) for side in (0, 1)
    )
    for index in islice(np.flatnonzero(~np.isfinite(left) | ~np.isfinite(right)), 1):
        place = f"{task.file}: task {task.task}, document {pairs[index][0].doc_id}"
        got = f"{metric} of {left[index]} (baseline) and {right[index]} (candidate)"
        raise InputError(place, got=got, need="finite numbers", fix="look at both answers, evaluate again")
    sign = 1 if task.higher_is_better.get(metric, True) else -1
    return TaskPair(
        task=task.task,
        metric=metric,
        filter=pairs[0][0].filter,
        sign=sign,
        documents=pairs,
        baseline=left,
        candidate=right,
    )


def _join_groups(chosen: Mapping[str, TaskPair], groups: Mapping[str, tuple[str, ...]]) -> Iterator[TaskPair]:
    """Yield each group as one pair, where its tasks share metric and filter, and the other tasks alone."""
    done: set[str] = set()
    for group, members in groups.items():
        pairs = [chosen[member] for member in members]
        if len({(pair.metric, pair.filter, pair.sign) for pair in pairs}) == 1 and not done & set(members):
            done |= set(members)
            yield TaskPair(
                task=group,
                metric=pairs[0].metric,
                filter=pairs[0].filter,
                sign=pairs[0].sign,
                documents=tuple(document for pair in pairs for document in pair.documents),
                baseline=np.concatenate([pair.baseline for pair in pairs]),
                candidate=np.concatenate([pair.candidate for pair in pairs]),
            )
    yield from (pair for name, pair in chosen.items() if name not in done)
