"""Pairs two models' answers to the same documents, by task, metric and filter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from vexport.errors import InputError
from vexport.evaluation.samples import HASHES, Sample, TaskSamples
from vexport.evaluation.statistics import MIN_CLUSTERS, Clusters, Scores

# Metrics of lm-eval that are from 0 to 1 for each document.
SHARES = frozenset(("acc", "acc_norm", "acc_bytes", "exact_match"))
_SHOWN = 40
"""Characters of two prompts from where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskPair:
    """Both models' scores on one task, metric and filter, in the same order of documents.

    `baseline` and `candidate` have the shape (documents,); `sign` is -1 where lower is better. `clusters`,
    of the same shape, numbers the tasks of a group whose documents are clustered, or the documents where
    `seeds` answers were sampled for each. `answers_known` is off where the baseline's answers were not kept,
    only whether they were right.
    """

    task: str
    metric: str
    filter: str
    sign: int
    documents: tuple[tuple[Sample, Sample], ...]
    baseline: Scores
    candidate: Scores
    clusters: Clusters | None = None
    seeds: int = 1
    answers_known: bool = True

    @property
    def binary(self) -> bool:
        """Return whether each document is either right (1) or wrong (0)."""
        return bool(np.isin(self.baseline, (0, 1)).all() and np.isin(self.candidate, (0, 1)).all())

    @property
    def chance(self) -> float:
        """The share of right answers of a model that guesses among the options; 0 where there are none."""
        return sum(1 / new.options for _, new in self.documents if new.options) / len(self.documents)

    @property
    def gain(self) -> Scores:
        """The candidate's score less the baseline's, for each document."""
        return self.sign * (self.candidate - self.baseline)

    @property
    def key(self) -> tuple[str, str, int]:
        """The values that must agree for pairs to be joined."""
        return self.metric, self.filter, self.sign


def pair_metrics(left: TaskSamples, right: TaskSamples, *, changed: Sequence[str] = ()) -> Iterator[TaskPair]:
    """Yield every (metric, filter) of a task that has one number a document, in the task's order.

    InputError names the document where the two runs did not answer the same question, and what `changed`.
    """
    _require_equal_documents(left, right, ", ".join(changed) or "nothing known")
    for filter_name in dict.fromkeys(key[0] for key in left.samples):
        pairs = tuple(
            (sample, right.samples[key]) for key, sample in left.samples.items() if key[0] == filter_name
        )
        for metric in _common_metrics(pairs):
            _require_same_direction(left, right, metric)
            yield _pair(left, metric, pairs)


def join_group(name: str, pairs: Sequence[TaskPair]) -> TaskPair:
    """The documents of a group's tasks as one task's, clustered by task where there are MIN_CLUSTERS."""
    by_task = np.repeat(np.arange(len(pairs)), [len(pair.gain) for pair in pairs])
    return _join(name, pairs, by_task) if len(pairs) >= MIN_CLUSTERS else pool(name, pairs)


def pool(name: str, pairs: Sequence[TaskPair]) -> TaskPair:
    """All documents as one task's; clusters stay, other documents are on their own."""
    if all(pair.clusters is None for pair in pairs):
        return _join(name, pairs, None)
    parts = [np.arange(len(pair.gain)) if pair.clusters is None else pair.clusters for pair in pairs]
    starts = np.cumsum([0, *(int(part.max()) + 1 for part in parts[:-1])])
    return _join(
        name, pairs, np.concatenate([part + start for part, start in zip(parts, starts, strict=True)])
    )


def _join(name: str, pairs: Sequence[TaskPair], clusters: Clusters | None) -> TaskPair:
    return TaskPair(
        task=name,
        metric=pairs[0].metric,
        filter=pairs[0].filter,
        sign=pairs[0].sign,
        documents=tuple(document for pair in pairs for document in pair.documents),
        baseline=np.concatenate([pair.baseline for pair in pairs]),
        candidate=np.concatenate([pair.candidate for pair in pairs]),
        clusters=clusters,
        seeds=max(pair.seeds for pair in pairs),
        answers_known=all(pair.answers_known for pair in pairs),
    )


def _require_equal_documents(left: TaskSamples, right: TaskSamples, changed: str) -> None:
    for first, other in ((left, right), (right, left)):
        lost = [key for key in first.samples if key not in other.samples]
        if lost:
            filter_name, doc_id, seed = lost[0]
            which = f"answer {seed} to document {doc_id}" if seed else f"document {doc_id}"
            got = f"no {which} (filter {filter_name}), {len(lost)} missing in all"
            fix = f"evaluate the documents of {first.file}, with the same --limit and --seeds"
            raise InputError(f"{other.file}: task {first.task}", got=got, need="the same documents", fix=fix)
    for key, sample in left.samples.items():
        twin = right.samples[key]
        for hash_name, ours, theirs in zip(HASHES, sample.hashes, twin.hashes, strict=True):
            if ours != theirs:
                where = f"{right.file}: task {left.task}, document {sample.doc_id}"
                prompts = _first_difference(sample.prompt, twin.prompt) if hash_name == "prompt_hash" else ""
                differ = prompts or f"{hash_name} {theirs[:12]}, the baseline has {ours[:12]}"
                got = f"{differ} (what else differs: {changed})"
                fix = "evaluate both with the same lm-eval, task files, few-shot examples and chat template"
                raise InputError(where, got=got, need="the same question", fix=fix)


def _require_same_direction(left: TaskSamples, right: TaskSamples, metric: str) -> None:
    """InputError where more is better in one of the two and worse in the other."""
    ours, theirs = (each.higher_is_better.get(metric) for each in (left, right))
    if None not in (ours, theirs) and ours != theirs:
        raise different_direction(f"{right.file}: task {left.task}", metric)


def different_direction(where: str, metric: str) -> InputError:
    """The error for two results that do not mean the same by a metric."""
    return InputError(
        where,
        got=f"higher_is_better of {metric} other than the baseline's",
        need="one meaning of the metric",
        fix="evaluate both with the same lm-eval and task files",
    )


def _first_difference(ours: str, theirs: str) -> str:
    """Return where two prompts part, in words; empty where they are the same."""
    if ours == theirs:
        return ""
    at = next(
        (i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), min(len(ours), len(theirs))
    )
    old, new = (repr(text[at : at + _SHOWN]) for text in (ours, theirs))
    return f"a prompt that goes on with {new} after {at} characters, the baseline's with {old}"


def _common_metrics(pairs: tuple[tuple[Sample, Sample], ...]) -> list[str]:
    first = pairs[0][0].scores
    return [name for name in first if all(name in x.scores and name in y.scores for x, y in pairs)]


def _pair(task: TaskSamples, metric: str, pairs: tuple[tuple[Sample, Sample], ...]) -> TaskPair:
    left, right = (
        np.array([pair[side].scores[metric] for pair in pairs], dtype=np.float64) for side in (0, 1)
    )
    low, high = np.minimum(left, right), np.maximum(left, right)
    wrong = {"finite numbers": ~np.isfinite(left) | ~np.isfinite(right)}
    if metric in SHARES:
        wrong["from 0 to 1"] = (low < 0) | (high > 1)
    for need, documents in wrong.items():
        for index in islice(np.flatnonzero(documents), 1):
            where = f"{task.file}: task {task.task}, document {pairs[index][0].doc_id}"
            got = f"{metric} of {left[index]} (baseline) and {right[index]} (candidate)"
            raise InputError(where, got=got, need=need, fix="look at both answers, evaluate again")
    sign = 1 if task.higher_is_better.get(metric, True) else -1
    return TaskPair(
        task=task.task,
        metric=metric,
        filter=pairs[0][0].filter,
        sign=sign,
        documents=pairs,
        baseline=left,
        candidate=right,
        clusters=_by_document(pairs),
        seeds=1 + max(sample.seed for sample, _ in pairs),
    )


def _by_document(pairs: tuple[tuple[Sample, Sample], ...]) -> Clusters | None:
    """The answers' documents, numbered, where there are several answers to one."""
    if not any(sample.seed for sample, _ in pairs):
        return None
    return np.unique([sample.doc_id for sample, _ in pairs], return_inverse=True)[1]
