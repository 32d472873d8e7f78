"""Accepted baselines: what a model answered right, in a file small enough for git and readable in a diff.

Documents stand in lines of 100 in the order of their numbers: their range with their scores, `1` and `0`
side by side where the metric is 0/1, and apart from that their range with three characters of each
question's digest. So later answers are paired document by document, and a changed answer is one digit of a
diff.
"""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from vexport.errors import InputError, raise_all
from vexport.evaluation.fingerprint import Fingerprint, causes
from vexport.evaluation.pairs import (
    Choice,
    GatedTask,
    TaskPair,
    gated_tasks,
    join_group,
    require_same_direction,
)
from vexport.evaluation.results import Results, Sample, read_results
from vexport.files import from_json, read_json_object, to_json, write_text

LINE = 100
"""Documents in a line."""
DIGEST = 3
"""Characters of 6 bits for each question: one changed question is missed once in 262144 times."""
_KIND = "vexport_baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedTask:
    """The scores of one task, and the digests of its questions, by `first-last` of their documents."""

    metric: str
    filter: str
    higher_is_better: bool
    documents: int
    score: float
    scores: Mapping[str, str]
    questions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """One model's scores on its gates, with what else could change them.

    `groups` maps a group that is judged as one task to its tasks.
    """

    vexport_baseline: Literal[1] = 1
    fingerprint: Fingerprint
    groups: Mapping[str, tuple[str, ...]]
    tasks: Mapping[str, AcceptedTask]


def is_accepted(path: Path) -> bool:
    """True for a file that is an accepted baseline, and not lm-eval's results."""
    return path.is_file() and _KIND in read_json_object(path)


def read_accepted(path: Path) -> Accepted:
    """Read an accepted baseline; InputError where it is something else or was damaged."""
    if not is_accepted(path):
        got = "something else" if path.exists() else "no such file"
        fix = "make it with `vexport eval --accept FILE`"
        raise InputError(str(path), got=got, need="an accepted baseline", fix=fix)
    accepted = from_json(Accepted, path)
    problems = []
    for name, task in accepted.tasks.items():
        try:
            stored_scores(task)
        except ValueError as error:
            where, need = f"{path}: tasks.{name}", "scores and questions of each document by `first-last`"
            fix = "restore it from git, or accept it again"
            problems.append(InputError(where, got=str(error), need=need, fix=fix))
    raise_all(problems)
    return accepted


def require_writable(path: Path) -> None:
    """InputError where `path` is something that an accepted baseline must not replace."""
    if path.exists() and (path.is_dir() or not is_accepted(path)):
        fix = "name another file, or remove it first"
        raise InputError(str(path), got="something else", need="a new file or an accepted baseline", fix=fix)


def accept_results(folder: Path, path: Path, choice: Choice) -> Accepted:
    """Write what an lm-eval output folder has on the gates to `path`, whole or not at all."""
    require_writable(path)
    results = read_results(folder)
    tasks: dict[str, AcceptedTask] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for gated in gated_tasks(results, results, choice):
        gate = gated.gate
        members = (gate.task,) if gate.task in results.tasks else results.groups[gate.task]
        if gate.task not in results.tasks:
            groups[gate.task] = members
        tasks |= {name: _accepted_task(results, name, gate) for name in members}
    accepted = Accepted(fingerprint=results.fingerprint, groups=groups, tasks=tasks)
    write_text(path, to_json(accepted))
    return accepted


def pair_with(accepted: Accepted, candidate: Results) -> tuple[GatedTask, ...]:
    """Pair a run with an accepted baseline, on the metrics and filters that were accepted.

    InputError, for all tasks at once: a task or document that one side lacks, questions that differ.
    """
    need, problems = "the accepted tasks", list[InputError]()
    pairs: dict[str, TaskPair] = {}
    for name, task in accepted.tasks.items():
        try:
            if name not in candidate.tasks:
                raise InputError(str(candidate.file), got=f"no task {name}", need=need, fix="evaluate it")
            pairs[name] = _pair(name, task, accepted, candidate)
        except InputError as problem:
            problems.append(problem)
    fix = "leave it out, or accept again"
    others = [name for name in candidate.tasks if name not in accepted.tasks]
    where = str(candidate.file)
    problems += [InputError(where, got=f"also task {name}", need=need, fix=fix) for name in others]
    raise_all(problems)
    joined = {group: tuple(pairs[member] for member in members) for group, members in accepted.groups.items()}
    grouped = {pair.task for also in joined.values() for pair in also}
    return (
        *(GatedTask(gate=join_group(group, also), also=also) for group, also in joined.items()),
        *(GatedTask(gate=pair, also=()) for name, pair in pairs.items() if name not in grouped),
    )


def _accepted_task(results: Results, name: str, gate: TaskPair) -> AcceptedTask:
    samples, where = _ordered(results, name, gate.filter), f"{results.file}: task {name}"
    if any(sample.seed for sample in samples):
        fix = "accept greedy answers, without --seeds"
        raise InputError(where, got="several answers to a document", need="one", fix=fix)
    if samples[-1].doc_id - samples[0].doc_id >= len(samples):
        fix = "evaluate all documents, or the first (--limit)"
        raise InputError(where, got="documents with gaps", need="consecutive ones", fix=fix)
    scores = [sample.scores[gate.metric] for sample in samples]
    chunks = [samples[start : start + LINE] for start in range(0, len(samples), LINE)]
    lines = {f"{chunk[0].doc_id}-{chunk[-1].doc_id}": chunk for chunk in chunks}
    return AcceptedTask(
        metric=gate.metric,
        filter=gate.filter,
        higher_is_better=gate.sign > 0,
        documents=len(samples),
        score=round(math.fsum(scores) / len(scores), 6),
        scores={line: _scores_text(chunk, gate.metric) for line, chunk in lines.items()},
        questions={line: "".join(map(_question, chunk)) for line, chunk in lines.items()},
    )


def _ordered(results: Results, name: str, filter_name: str) -> list[Sample]:
    """A task's samples after one filter, by document."""
    samples = [sample for sample in results.tasks[name].samples.values() if sample.filter == filter_name]
    return sorted(samples, key=lambda sample: sample.doc_id)


def _scores_text(chunk: Sequence[Sample], metric: str) -> str:
    scores = [sample.scores[metric] for sample in chunk]
    binary = all(score in (0, 1) for score in scores)
    return "".join(f"{score:.0f}" for score in scores) if binary else " ".join(map(repr, scores))


def _question(sample: Sample) -> str:
    """A digest of a document, its prompt and its target."""
    text = f"{sample.doc_id} {' '.join(sample.hashes)}"
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())[:DIGEST].decode()


def stored_scores(task: AcceptedTask) -> dict[int, tuple[float, str]]:
    """Document -> score and question; ValueError names the line that is damaged."""
    stored: dict[int, tuple[float, str]] = {}
    for where, text in task.scores.items():
        first, _, last = where.partition("-")
        documents = range(int(first), int(last) + 1)
        scores = [float(score) for score in (text if set(text) <= {"0", "1"} else text.split(" "))]
        digests = task.questions.get(where, "")
        if not len(documents) == len(scores) == len(digests) / DIGEST or not all(map(math.isfinite, scores)):
            raise ValueError(f"{where}: {text[:60]}")
        for index, (document, score) in enumerate(zip(documents, scores, strict=True)):
            stored[document] = score, digests[DIGEST * index : DIGEST * (index + 1)]
    if len(stored) != task.documents or not stored:
        raise ValueError(f"{len(stored)} documents, not {task.documents}")
    return stored


def _pair(name: str, task: AcceptedTask, accepted: Accepted, candidate: Results) -> TaskPair:
    samples = _ordered(candidate, name, task.filter)
    where, old = f"{candidate.file}: task {name}", stored_scores(task)
    direction = candidate.tasks[name].higher_is_better.get(task.metric)
    require_same_direction(where, task.metric, task.higher_is_better, direction)
    complete = all(task.metric in sample.scores and sample.doc_id in old for sample in samples)
    if not complete or not samples or len(samples) != task.documents:
        got = f"{len(samples)} documents with {task.metric},{task.filter}"
        fix = "evaluate with the same --limit, or accept it again"
        raise InputError(where, got=got, need=f"the {task.documents} that were accepted", fix=fix)
    for sample in samples:
        if old[sample.doc_id][1] != _question(sample):
            since = ", ".join(causes(accepted.fingerprint, candidate.fingerprint, name)) or "nothing known"
            got = f"another question in document {sample.doc_id} (changed since it was accepted: {since})"
            fix = "evaluate as before, or accept it again"
            raise InputError(where, got=got, need="the questions that were accepted", fix=fix)

    def answer(sample: Sample) -> str:
        return f"(scored {old[sample.doc_id][0]:g}; the answer was not kept)"

    return TaskPair(
        task=name,
        metric=task.metric,
        filter=task.filter,
        sign=1 if task.higher_is_better else -1,
        documents=tuple((replace(sample, answer=answer(sample)), sample) for sample in samples),
        baseline=np.array([old[sample.doc_id][0] for sample in samples]),
        candidate=np.array([sample.scores[task.metric] for sample in samples]),
        answers_known=False,
    )


def choice_of(accepted: Accepted) -> Choice:
    """The gates that were accepted, to accept the same again."""
    grouped = {member for members in accepted.groups.values() for member in members}
    names = {group: members[0] for group, members in accepted.groups.items()}
    names |= {name: name for name in accepted.tasks if name not in grouped}
    tasks = {unit: accepted.tasks[name] for unit, name in names.items()}
    return {unit: f"{task.metric},{task.filter}" for unit, task in tasks.items()}


def gates_of(accepted: Accepted) -> str:
    """The accepted tasks in words: `addition (exact_match,none), 1382 documents, 0.9964`."""
    return "; ".join(
        f"{name} ({task.metric},{task.filter}), {task.documents} documents, {task.score:g}"
        for name, task in accepted.tasks.items()
    )
