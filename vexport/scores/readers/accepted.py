"""Accepted baselines: a model's scores of every document, in a file that is small enough for git.

In a diff of the file, a changed score is one digit. Each line has 100 documents, in the order of
their numbers:
- `scores` maps the range of documents to their scores, written as `1` and `0` without spaces if the
  metric is 0/1.
- `questions` maps the range to three characters of each question's digest.
- `endings` has a letter for each response (`LETTERS` in endings.py). A line is stored only if one
  of its responses was cut, is empty, or contains no answer.

Responses of a later evaluation are paired with the stored scores document by document.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from vexport.errors import InputError, raise_all
from vexport.files import digest_file, from_json, read_json_object
from vexport.foreign import LARGEST_SCORE, require_unique_fields, span
from vexport.inference.fingerprint import Fingerprint
from vexport.inference.questions import DIGEST_LENGTH
from vexport.names import ACCEPTED_KEY
from vexport.records import AcceptedBaseline
from vexport.records.chosen_metric import Choice, direction_name, parse_chosen_metric
from vexport.records.margin import Margins, MarginValue
from vexport.rules import baseline
from vexport.rules import results as rules
from vexport.scores.endings import LETTERS, letter_of
from vexport.scores.metrics import known_direction
from vexport.scores.settings import DIGITS
from vexport.scores.table import Key, Row, ScoreTable, TaskTable

LINE = 100
"""Number of documents in a line."""
WHOLE = "."
"""Letter of a response that was not cut, is not empty, and contains an answer."""
# Decimals of a stored mean score, and the largest difference that can come from rounding.
_DECIMALS, _PRECISION = 6, 1.1e-6


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
        raise InputError.of(rules.NO_BASELINE, str(path))
    accepted = from_json(Accepted, path)
    require_unique_fields(path)
    problems = [
        InputError.of(rules.BASELINE_GROUP, f"{path}: groups.{name}", tasks=list(members))
        for name, members in accepted.groups.items()
        if not members or not accepted.tasks.keys() >= {*members}
    ]
    for name, task in accepted.tasks.items():
        try:
            _require_score(task, _rows(task))
        except ValueError as error:
            where = f"{path}: tasks.{name}"
            problems.append(InputError.of(rules.BASELINE_SCORES, where, reason=error))
    try:
        Margins.read(accepted.margin)
    except ValueError as error:
        where, value = f"{path}: margin", accepted.margin
        problems.append(InputError.of(rules.BASELINE_MARGIN, where, value=value, need=error))
    raise_all(problems)
    return accepted


def read_accepted_table(path: Path, names: Collection[str] = ()) -> ScoreTable:
    """Read the scores in an accepted baseline, of the tasks and groups `names` or of all.

    Its rows have only scores, endings and digests of the questions.

    Raises:
        InputError: If the file has another kind or is damaged.
    """
    accepted = read_accepted(path)
    tasks = {
        name: TaskTable(
            task=name,
            file=path,
            rows=_rows(task),
            higher_is_better={}
            if task.higher_is_better is None
            else {task.metric: task.higher_is_better},
            fingerprint=accepted.fingerprint,
        )
        for name, task in accepted.tasks.items()
    }
    return ScoreTable(
        file=path,
        tasks=tasks,
        names=(*accepted.tasks, *accepted.groups),
        groups=accepted.groups,
        members=accepted.groups,
        fingerprint=accepted.fingerprint,
        identity=describe_accepted(path, accepted),
        margin=accepted.margin,
        gates=choice_of(accepted),
    ).selected(names)


def _rows(task: AcceptedTask) -> dict[Key, Row]:
    """Raises ValueError if a line is damaged. The error names the line."""
    rows: dict[Key, Row] = {}
    for line, text in task.scores.items():
        documents = span(line)
        scores = [float(score) for score in (text if set(text) <= {"0", "1"} else text.split(" "))]
        digests = task.questions.get(line, "")
        if not len(documents) == len(scores) == len(digests) / DIGEST_LENGTH or not all(
            abs(score) <= LARGEST_SCORE for score in scores
        ):
            raise ValueError(f"{line}: {text[:60]}")
        letters = (task.endings or {}).get(line, WHOLE * len(documents))
        if len(letters) != len(documents) or not set(letters) <= set(LETTERS):
            raise ValueError(f"{line}: {letters[:60]}")
        for index, document in enumerate(documents):
            start = DIGEST_LENGTH * index
            row = Row(
                filter=task.filter,
                doc_id=document,
                scores={task.metric: scores[index]},
                hashes=(digests[start : start + DIGEST_LENGTH],),
                ending=None if task.endings is None else LETTERS[letters[index]],
                shown_text=f"(scored {scores[index]:g}; the response was not kept)",
                compared_text=None,
            )
            rows[row.key] = row
    if unknown := next((line for line in task.endings or {} if line not in task.scores), None):
        raise ValueError(f"{unknown}: {(task.endings or {})[unknown][:60]}")
    if len(rows) != task.documents or not rows:
        raise ValueError(f"{len(rows)} documents, not {task.documents}")
    return rows


def _require_score(task: AcceptedTask, rows: Mapping[Key, Row]) -> None:
    mean = rounded_mean([row.scores[task.metric] for row in rows.values()])
    if not math.isclose(task.score, mean, rel_tol=1e-9, abs_tol=_PRECISION):
        raise ValueError(f"score {task.score}, but the mean of its documents is {mean}")


def rounded_mean(scores: Sequence[float]) -> float:
    """Return a mean as the file stores it."""
    return round(math.fsum(scores) / len(scores), _DECIMALS)


def accepted_task(rows: Sequence[Row], metric: str, higher_is_better: bool | None) -> AcceptedTask:
    """Return a task as the file stores it. `rows` are ordered by consecutive documents."""
    chunks = [rows[start : start + LINE] for start in range(0, len(rows), LINE)]
    lines = {f"{chunk[0].doc_id}-{chunk[-1].doc_id}": chunk for chunk in chunks}
    return AcceptedTask(
        metric=metric,
        filter=rows[0].filter,
        higher_is_better=higher_is_better,
        documents=len(rows),
        score=rounded_mean([row.scores[metric] for row in rows]),
        scores={line: _scores_text(chunk, metric) for line, chunk in lines.items()},
        questions={line: "".join(row.digest for row in chunk) for line, chunk in lines.items()},
        endings=_endings_text(lines),
    )


def _scores_text(chunk: Sequence[Row], metric: str) -> str:
    scores = [row.scores[metric] for row in chunk]
    binary = all(score in (0, 1) for score in scores)
    return "".join(f"{score:.0f}" for score in scores) if binary else " ".join(map(repr, scores))


def _endings_text(lines: Mapping[str, Sequence[Row]]) -> dict[str, str] | None:
    """Return the letters of all responses, for each line with a response that may not count.

    Return None if the responses were not generated.
    """
    endings = {line: [row.ending for row in chunk] for line, chunk in lines.items()}
    letters = {
        line: "".join(letter_of(ending) for ending in ended if ending is not None)
        for line, ended in endings.items()
    }
    if any(len(text) < len(lines[line]) for line, text in letters.items()):
        return None
    return {line: text for line, text in letters.items() if text.strip(WHOLE)}


def describe_accepted(path: Path, accepted: Accepted) -> AcceptedBaseline:
    """Return the record by which verdicts identify the accepted baseline in the file `path`."""
    return AcceptedBaseline(digest=digest_file(path)[:DIGITS], accepted=accepted.accepted)


def gate_contradictions(
    accepted: Choice, gate: Choice, where: str, file: Path
) -> Iterator[InputError]:
    """Yield an error for each chosen gate that differs from the accepted gate in `file`."""
    for name, chosen in gate.items():
        for unit, old in accepted.items():
            if name in (unit, "*") and not _agree(chosen, old):
                value, stored = f"{unit}={chosen}", f"{unit}={old}"
                yield InputError.of(
                    baseline.OTHER_SETTING, where, value=value, accepted=stored, file=file
                )


def _agree(text: str, accepted: str) -> bool:
    chosen, old = parse_chosen_metric(text), parse_chosen_metric(accepted)
    directions = {chosen.higher_is_better, old.higher_is_better} - {None}
    return chosen.label in (old.label, old.metric) and len(directions) < 2


def choice_of(accepted: Accepted) -> Choice:
    """Return the accepted gates, so that the same gates can be accepted again.

    A gate contains a direction if it was stated and the metric's name does not define it.
    """
    firsts = {name: accepted.groups.get(name, (name,))[0] for name in accepted.names}
    return {name: _gate_text(accepted.tasks[first]) for name, first in firsts.items()}


def _gate_text(task: AcceptedTask) -> str:
    better = task.higher_is_better
    is_needed = better is not None and better != known_direction(task.metric)
    direction = f":{direction_name(bool(better))}" if is_needed else ""
    return f"{task.metric}{direction},{task.filter}"
