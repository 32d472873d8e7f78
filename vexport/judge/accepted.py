"""Accepted baselines: a model's scores of every document, in a file that is small enough for git.

In a diff of the file, a changed score is one digit. Each line has 100 documents, in the order of
their numbers:
- `scores` maps the range of documents to their scores, written as `1` and `0` without spaces if the
  metric is 0/1.
- `questions` maps the range to three characters of each question's digest.
- `endings` has a letter for each response (`LETTERS` in lost.py). A line is stored only if one of
  its responses was cut, is empty, or contains no answer.

Responses of a later evaluation are paired with the stored scores document by document.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import JsonValue

from vexport.errors import InputError, raise_all, shown
from vexport.files import digest_file, from_json, read_json_object, to_json, write_text
from vexport.foreign import LARGEST_SCORE, require_unique_fields, span
from vexport.inference.fingerprint import Fingerprint
from vexport.inference.questions import DIGEST_LENGTH, QuestionDigests, question_digest
from vexport.judge.lost import count_answers, lost_answers_text
from vexport.judge.margin_checks import require_fitting
from vexport.judge.pairs import Choice, TaskPair, gated_tasks
from vexport.names import ACCEPTED_KEY
from vexport.records import AcceptedBaseline
from vexport.records.chosen_metric import direction_name, parse_chosen_metric
from vexport.records.margin import Margins, MarginSetting, MarginValue
from vexport.scores.endings import LETTERS, Ending, letter_of
from vexport.scores.metrics import is_no_share, known_direction
from vexport.scores.results import Results, Sample, TaskSamples, read_results
from vexport.scores.settings import (
    DIGITS,
    changed_settings,
    without_model,
)

LINE = 100
"""Number of documents in a line."""
WHOLE = "."
"""Letter of a response that was not cut, is not empty, and contains an answer."""
# Decimals of a stored mean score, and the largest difference that can come from rounding.
_DECIMALS, _PRECISION = 6, 1.1e-6
_FIX_RESTORE = "restore it from git, or accept it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedTask:
    """Scores of one task and digests of its questions, by ranges `first-last` of documents.

    `endings` has a letter for each response, but only for ranges in which a response was cut, is
    empty, or contains no answer. `endings` is None if the responses were not generated.
    `higher_is_better` is None if nothing states the direction.
    """

    metric: str
    filter: str
    higher_is_better: bool | None
    documents: int
    score: float
    scores: Mapping[str, str]
    questions: Mapping[str, str]
    endings: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """One model's scores with the metrics that decide, and the settings that could change them.

    `groups` maps each group that is judged as a single task to the tasks in it. `settings` are the
    settings of the evaluation, by their keys in a scenario (accepted_settings.py). `accepted` is
    the time at which the model was accepted, and `checkpoint` is its name. In files that were made
    without a call of `vexport eval`, `settings` is None and both are empty. `margin` is the
    acceptable loss of later candidates.
    """

    vexport_baseline: Literal[1] = 1
    accepted: str = ""
    checkpoint: str = ""
    settings: Mapping[str, JsonValue] | None = None
    margin: MarginValue | Mapping[str, MarginValue] | None = None
    fingerprint: Fingerprint
    groups: Mapping[str, tuple[str, ...]]
    tasks: Mapping[str, AcceptedTask]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups, and of the tasks without a group."""
        grouped = {member for members in self.groups.values() for member in members}
        return (*self.groups, *(name for name in self.tasks if name not in grouped))


def is_accepted(path: Path) -> bool:
    """Return True if the file is an accepted baseline, and False for a harness's results."""
    if path.suffix in (".jsonl", ".parquet"):
        return False
    return path.is_file() and ACCEPTED_KEY in read_json_object(path)


def read_accepted(path: Path) -> Accepted:
    """Read an accepted baseline.

    Raises:
        InputError: If the file has another kind or is damaged.
    """
    if not is_accepted(path):
        got = "something else" if path.exists() else "no such file"
        fix = "make it with `vexport eval --accept FILE`"
        raise InputError(str(path), got=got, need="an accepted baseline", fix=fix)
    accepted = from_json(Accepted, path)
    require_unique_fields(path)
    problems = [*_group_problems(path, accepted)]
    for name, task in accepted.tasks.items():
        try:
            _require_score(task, stored_scores(task))
            stored_endings(task)
        except ValueError as error:
            where = f"{path}: tasks.{name}"
            need = "a score and a question's digest for each document, as vexport wrote them"
            problems.append(InputError(where, got=str(error), need=need, fix=_FIX_RESTORE))
    try:
        Margins.read(accepted.margin)
    except ValueError as error:
        got = shown(accepted.margin)
        problems.append(InputError(f"{path}: margin", got=got, need=str(error), fix=_FIX_RESTORE))
    raise_all(problems)
    return accepted


def _group_problems(path: Path, accepted: Accepted) -> Iterator[InputError]:
    """Yield an error for each group without tasks, or with a task that the file does not have."""
    for name, members in accepted.groups.items():
        unknown = [member for member in members if member not in accepted.tasks]
        if unknown or not members:
            got = f"the unknown task {shown(unknown[0], 100)}" if unknown else "no task"
            need = "tasks of this file"
            yield InputError(f"{path}: groups.{name}", got=got, need=need, fix=_FIX_RESTORE)


def _require_score(task: AcceptedTask, stored: Mapping[int, tuple[float, str]]) -> None:
    """Raise ValueError if the stored mean is not the mean of the stored scores."""
    mean = _rounded_mean([score for score, _ in stored.values()])
    if not math.isclose(task.score, mean, rel_tol=1e-9, abs_tol=_PRECISION):
        raise ValueError(f"score {task.score}, but the mean of its documents is {mean}")


def _rounded_mean(scores: Sequence[float]) -> float:
    return round(math.fsum(scores) / len(scores), _DECIMALS)


def require_writable(path: Path) -> None:
    """Raise InputError if `path` must not be replaced: it exists and is no accepted baseline."""
    if path.exists() and (path.is_dir() or not is_accepted(path)):
        fix = "name another file, or remove it first"
        raise InputError(
            str(path), got="something else", need="a new file or an accepted baseline", fix=fix
        )


def describe_accepted(path: Path, accepted: Accepted) -> AcceptedBaseline:
    """Return the record by which verdicts identify the accepted baseline in the file `path`."""
    return AcceptedBaseline(digest=digest_file(path)[:DIGITS], accepted=accepted.accepted)


def accept_results(
    folder: Path,
    path: Path,
    choice: Choice,
    settings: Mapping[str, JsonValue] | None = None,
    *,
    margin: MarginSetting = None,
    checkpoint: str = "",
    accepted_at: str = "",
) -> Accepted:
    """Write the scores of the deciding metrics from an lm-eval output folder to `path`.

    `choice` names the deciding metrics, as in `gated_tasks`. `settings` are the settings of the
    evaluation, if they are known. `margin` is the acceptable loss of later candidates. `checkpoint`
    is the name of the model, and `accepted_at` is the time. The file is written completely or not
    at all.
    """
    require_writable(path)
    results = read_results(folder)
    tasks: dict[str, AcceptedTask] = {}
    groups: dict[str, tuple[str, ...]] = {}
    gates = gated_tasks(results, results, choice)
    for gate in gates:
        members = (gate.task,) if gate.task in results.tasks else results.groups[gate.task]
        if gate.task not in results.tasks:
            groups[gate.task] = members
        tasks |= {name: _accepted_task(results, name, gate) for name in members}
    margins = Margins.read(margin)
    require_fitting(gates, margins)
    accepted = Accepted(
        accepted=accepted_at,
        checkpoint=checkpoint,
        settings=settings,
        margin=margins.to_store({gate.task: gate.unit for gate in gates}),
        fingerprint=without_model(results.fingerprint),
        groups=groups,
        tasks=tasks,
    )
    write_text(path, to_json(accepted))
    return accepted


def select_accepted(accepted: Accepted, tasks: Collection[str]) -> Accepted:
    """Return the baseline with these tasks. A group keeps the tasks that are in it."""
    tasks = frozenset(tasks)
    groups = {
        name: tuple(member for member in members if member in tasks)
        for name, members in accepted.groups.items()
    }
    return replace(
        accepted,
        tasks={name: task for name, task in accepted.tasks.items() if name in tasks},
        groups={name: members for name, members in groups.items() if members},
    )


def pair_with(accepted: Accepted, candidate: Results, choice: Choice) -> tuple[TaskPair, ...]:
    """Pair a run with an accepted baseline, on the accepted metrics and filters.

    Both have the same tasks. `choice` may state the direction of a metric that was accepted without
    a direction.

    Raises:
        InputError: If a document is missing in the run or in the baseline, or if a question
        differs. The error names all tasks with such a problem.
    """
    problems = list[InputError]()
    old: dict[str, TaskSamples] = {}
    new: dict[str, TaskSamples] = {}
    for name, task in accepted.tasks.items():
        try:
            new[name] = _answers_now(name, task, accepted, candidate)
            old[name] = _accepted_answers(task, new[name])
        except InputError as problem:
            problems.append(problem)
    raise_all(problems)
    baseline = replace(candidate, tasks=old, groups=accepted.groups)
    return gated_tasks(baseline, replace(candidate, tasks=new), choice)


def _accepted_task(results: Results, name: str, gate: TaskPair) -> AcceptedTask:
    samples, where = _ordered(results, name, gate.filter), f"{results.file}: task {name}"
    if any(sample.seed for sample in samples):
        fix = "accept greedy responses, without --seeds"
        raise InputError(where, got="several responses to a document", need="one", fix=fix)
    if _number(samples[-1]) - _number(samples[0]) >= len(samples):
        fix = "evaluate all documents, or the first (--limit)"
        raise InputError(
            where, got="gaps in the document numbers", need="consecutive documents", fix=fix
        )
    if not all(gate.metric in sample.scores for sample in samples):
        fix = "use --baseline, or choose another metric with --gate"
        got = f"{gate.metric}, which lm-eval computes from all documents at once"
        raise InputError(where, got=got, need="one number a document", fix=fix)
    scores = [sample.scores[gate.metric] for sample in samples]
    chunks = [samples[start : start + LINE] for start in range(0, len(samples), LINE)]
    lines = {f"{chunk[0].doc_id}-{chunk[-1].doc_id}": chunk for chunk in chunks}
    return AcceptedTask(
        metric=gate.metric,
        filter=gate.filter,
        higher_is_better=_stated_direction(results.tasks[name], gate),
        documents=len(samples),
        score=_rounded_mean(scores),
        scores={line: _scores_text(chunk, gate.metric) for line, chunk in lines.items()},
        questions={line: "".join(map(_question, chunk)) for line, chunk in lines.items()},
        endings=_endings_text(lines),
    )


def _stated_direction(task: TaskSamples, gate: TaskPair) -> bool | None:
    """Return whether a higher aggregate is better, or None if nothing states it."""
    if gate.direction_assumed:
        return None
    return gate.sign > 0 if gate.own_unit is None else task.direction(gate.metric)


def _endings_text(lines: Mapping[str, Sequence[Sample]]) -> dict[str, str] | None:
    """Return the letters of all responses, for each line with a response that may not count.

    Return None if the responses were not generated.
    """
    endings = {line: [sample.ending for sample in chunk] for line, chunk in lines.items()}
    letters = {
        line: "".join(letter_of(ending) for ending in ended if ending is not None)
        for line, ended in endings.items()
    }
    if any(len(text) < len(lines[line]) for line, text in letters.items()):
        return None
    return {line: text for line, text in letters.items() if text.strip(WHOLE)}


def _ordered(results: Results, name: str, filter_name: str) -> list[Sample]:
    """Return a task's samples after one filter, ordered by document."""
    samples = [
        sample for sample in results.tasks[name].samples.values() if sample.filter == filter_name
    ]
    return sorted(samples, key=_number)


def _number(sample: Sample) -> int:
    """Return the number of a sample's document. lm-eval's documents always have numbers."""
    assert isinstance(sample.doc_id, int)
    return sample.doc_id


def _scores_text(chunk: Sequence[Sample], metric: str) -> str:
    scores = [sample.scores[metric] for sample in chunk]
    binary = all(score in (0, 1) for score in scores)
    return "".join(f"{score:.0f}" for score in scores) if binary else " ".join(map(repr, scores))


def _question(sample: Sample) -> str:
    """Return a digest of a document, its prompt and its target."""
    return question_digest(sample.doc_id, sample.hashes)


def stored_scores(task: AcceptedTask) -> dict[int, tuple[float, str]]:
    """Return the score and the question's digest of each document.

    Raises:
        ValueError: If a line is damaged. The error names the line.
    """
    stored: dict[int, tuple[float, str]] = {}
    for where, text in task.scores.items():
        documents = span(where)
        scores = [float(score) for score in (text if set(text) <= {"0", "1"} else text.split(" "))]
        digests = task.questions.get(where, "")
        if not len(documents) == len(scores) == len(digests) / DIGEST_LENGTH or not all(
            abs(score) <= LARGEST_SCORE for score in scores
        ):
            raise ValueError(f"{where}: {text[:60]}")
        for index, (document, score) in enumerate(zip(documents, scores, strict=True)):
            stored[document] = score, digests[DIGEST_LENGTH * index : DIGEST_LENGTH * (index + 1)]
    if len(stored) != task.documents or not stored:
        raise ValueError(f"{len(stored)} documents, not {task.documents}")
    return stored


def expected_questions(accepted: Accepted) -> QuestionDigests:
    """Return the digest of each accepted question, by task and document."""
    return {
        name: {str(document): digest for document, (_, digest) in stored_scores(task).items()}
        for name, task in accepted.tasks.items()
    }


def stored_endings(task: AcceptedTask) -> dict[int, Ending] | None:
    """Return how the response to each document ended, or None if the file does not contain it.

    Raises:
        ValueError: If a line is damaged.
    """
    if task.endings is None:
        return None
    endings = dict.fromkeys(stored_scores(task), LETTERS[WHOLE])
    for line, letters in task.endings.items():
        documents = span(line)
        if (
            line not in task.scores
            or len(letters) != len(documents)
            or not set(letters) <= set(LETTERS)
        ):
            raise ValueError(f"{line}: {letters[:60]}")
        endings |= {
            document: LETTERS[letter] for document, letter in zip(documents, letters, strict=True)
        }
    return endings


def _answers_now(
    name: str, task: AcceptedTask, accepted: Accepted, candidate: Results
) -> TaskSamples:
    """Return a task's samples after the accepted filter.

    Raises:
        InputError: If the run has other documents than the baseline, lacks the accepted metric, or
        has different questions.
    """
    samples = _ordered(candidate, name, task.filter)
    where, old = f"{candidate.file}: task {name}", stored_scores(task)
    complete = all(task.metric in sample.scores and sample.doc_id in old for sample in samples)
    if not complete or not samples or len(samples) != task.documents:
        got = f"{len(samples)} documents with {task.metric},{task.filter}"
        larger = candidate.tasks[name].larger
        fix = "evaluate with the same --limit, or accept it again"
        if larger is not None and len(samples) < task.documents:
            fix = f"give {larger}, which is older and has more documents of the task"
        raise InputError(where, got=got, need=f"the {task.documents} that were accepted", fix=fix)
    for sample in samples:
        if old[_number(sample)][1] != _question(sample):
            since = (
                ", ".join(
                    changed_settings(accepted.fingerprint, candidate.fingerprint_of(name), name)
                )
                or "nothing known"
            )
            got = (
                f"another question in document {sample.doc_id} (changed since it was "
                f"accepted: {since})"
            )
            fix = "evaluate as before, or accept it again"
            raise InputError(where, got=got, need="the accepted questions", fix=fix)
    return replace(candidate.tasks[name], samples={sample.key: sample for sample in samples})


def _accepted_answers(task: AcceptedTask, now: TaskSamples) -> TaskSamples:
    """Return samples of the same documents with the accepted scores.

    The samples have scores but no texts, because accepted baselines do not contain responses.
    """
    samples: dict[tuple[str, int | str, int], Sample] = {}
    stored, endings = stored_scores(task), stored_endings(task)
    for key, sample in now.samples.items():
        score, _ = stored[_number(sample)]
        ending = None if endings is None else endings[_number(sample)]
        samples[key] = replace(
            sample,
            shown_text=f"(scored {score:g}; the response was not kept)",
            compared_text=None,
            scores={task.metric: score},
            ending=ending,
        )
    better = {} if task.higher_is_better is None else {task.metric: task.higher_is_better}
    return replace(now, higher_is_better=better, samples=samples, aggregates={})


def lost_answers(accepted: Accepted, alpha: float) -> tuple[str, ...]:
    """Describe lost and unparsed responses, for each task in which they reach 1 %."""
    described = []
    for name, task in accepted.tasks.items():
        endings = stored_endings(task)
        if endings is None:
            continue
        scores = np.array([score for score, _ in stored_scores(task).values()])
        sign = -1 if task.higher_is_better is False else 1
        counts = count_answers([*endings.values()], scores, sign=sign, alpha=alpha)
        if words := lost_answers_text(None, counts):
            described.append(f"{name}: {words}")
    return tuple(described)


def gate_contradictions(accepted: Accepted, gate: Choice) -> Iterator[InputError]:
    """Yield an error for each chosen gate that differs from the accepted gate.

    `gate` maps a task or group, or `*` for all, to METRIC[:higher|:lower][,FILTER].
    """
    for name, chosen in gate.items():
        for unit, old in choice_of(accepted).items():
            if name in (unit, "*") and not _agree(chosen, old):
                got, need = f"{unit}={chosen}", f"{unit}={old}, as accepted"
                fix = "leave it out, or accept the baseline again with this gate"
                yield InputError("gate", got=got, need=need, fix=fix)


def _agree(text: str, accepted: str) -> bool:
    """Return True if a chosen metric does not contradict the accepted metric."""
    chosen, old = parse_chosen_metric(text), parse_chosen_metric(accepted)
    directions = {chosen.higher_is_better, old.higher_is_better} - {None}
    return chosen.label in (old.label, old.metric) and len(directions) < 2


def choice_of(accepted: Accepted) -> Choice:
    """Return the accepted gates, so that the same gates can be accepted again.

    A gate contains a direction if it was stated and the metric's name does not define it.
    """
    grouped = {member for members in accepted.groups.values() for member in members}
    names = {group: members[0] for group, members in accepted.groups.items()}
    names |= {name: name for name in accepted.tasks if name not in grouped}
    tasks = {unit: accepted.tasks[name] for unit, name in names.items()}
    return {unit: _gate_text(task) for unit, task in tasks.items()}


def _gate_text(task: AcceptedTask) -> str:
    better = task.higher_is_better
    is_needed = better is not None and better != known_direction(task.metric)
    direction = f":{direction_name(bool(better))}" if is_needed else ""
    return f"{task.metric}{direction},{task.filter}"


def accepted_scores_text(accepted: Accepted) -> str:
    """Return the accepted scores: `addition (exact_match,none) 99.6% of 1,382 documents`."""
    return "; ".join(
        f"{name} ({task.metric},{task.filter}) {_score_text(task)} of {task.documents:,} documents"
        for name, task in accepted.tasks.items()
    )


def _score_text(task: AcceptedTask) -> str:
    """Return the mean score: in per cent if the metric is a share, else as a number."""
    scores = [score for score, _ in stored_scores(task).values()]
    is_share = not is_no_share(task.metric) and all(0 <= score <= 1 for score in scores)
    return f"{task.score:.1%}" if is_share else f"{task.score:.4g}"
