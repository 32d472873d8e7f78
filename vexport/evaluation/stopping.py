"""Which documents to read next, and when the evidence suffices: an evaluation that stops early.

The documents of a task, or of all tasks of a group, are read in one random order that a seed fixes before
anything is known. After each look the bets of `betting` on what was read so far may end it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vexport.errors import InputError
from vexport.evaluation.accepted import is_accepted, read_accepted, stored_scores
from vexport.evaluation.betting import anytime_interval, decide_now
from vexport.evaluation.gates import Choice, gated_tasks
from vexport.evaluation.pairs import TaskPair
from vexport.evaluation.results import read_results
from vexport.files import from_json, to_json, write_text
from vexport.types import PROGRESS_DETAIL, Look, Outcome

FILE = "looks.json"
FIRST_LOOK = 100
PLACES = 33
"""Characters of an interval on the terminal."""
GROWTH = 0.25
"""Each look reads a quarter more: at most that much is read in vain, and there are about 25 looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The baseline's scores of one task by document, on the metric and filter that decide for its `unit`:
    the task itself, or the group that is judged as one task.
    """

    unit: str
    metric: str
    filter: str
    sign: int
    scores: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """What an evaluation needs in order to know when it is decided."""

    margin: float
    alpha: float
    seed: int
    tasks: Mapping[str, Reference]


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Every look of an evaluation, in order."""

    looks: tuple[Look, ...]


def stopping_rule(baseline: Path, choice: Choice, *, margin: float, alpha: float, seed: int) -> Stopping:
    """From a baseline's lm-eval folder, or an accepted baseline. InputError where samples are missing."""
    tasks = dict(_accepted_references(baseline) if is_accepted(baseline) else _references(baseline, choice))
    for name, task in tasks.items():
        require_unit_range(f"{baseline}: task {name}", task.metric, task.scores.values())
    return Stopping(margin=margin, alpha=alpha, seed=seed, tasks=tasks)


class SequentialTest:
    """The state of an evaluation that may stop early."""

    def __init__(self, stopping: Stopping) -> None:
        self._stopping = stopping
        self._units = list(dict.fromkeys(task.unit for task in stopping.tasks.values()))
        self._orders = {unit: self._shuffled(unit, number) for number, unit in enumerate(self._units)}
        self._read = dict.fromkeys(self._units, 0)
        self._looks: dict[str, Look] = {}

    @property
    def decided(self) -> bool:
        """Whether nothing that is still unread could be needed: a FAIL, or an answer or an end everywhere."""
        if any(look.outcome == "FAIL" for look in self._looks.values()):
            return True
        return len(self._looks) == len(self._units) and not any(map(self._open, self._units))

    def more(self) -> dict[str, list[int]]:
        """Read on where it is open: all documents read so far, sorted, by task."""
        for unit in self._units:
            if unit not in self._looks or self._open(unit):
                self._read[unit] = self._next(unit)
        documents: dict[str, list[int]] = {task: [] for task in self._stopping.tasks}
        for unit, order in self._orders.items():
            for task, document in order[: self._read[unit]]:
                documents[task].append(document)
        return {task: sorted(found) for task, found in documents.items()}

    def look(self, scores: Mapping[str, Mapping[int, float]]) -> tuple[Look, ...]:
        """Judge the candidate's scores, by task and document, of what `more` asked for."""
        for unit in self._units:
            if unit not in self._looks or self._open(unit):
                self._looks[unit] = self._judged(unit, scores)
        return tuple(self._looks.values())

    def _open(self, unit: str) -> bool:
        look = self._looks[unit]
        return look.outcome == "INCONCLUSIVE" and look.read < look.of

    def _shuffled(self, unit: str, number: int) -> list[tuple[str, int]]:
        documents = [
            (name, document)
            for name, task in self._stopping.tasks.items()
            if task.unit == unit
            for document in sorted(task.scores)
        ]
        order = np.random.default_rng([self._stopping.seed, number]).permutation(len(documents))
        return [documents[index] for index in order]

    def _next(self, unit: str) -> int:
        """The documents of the next look; the first has one of each task at least."""
        order, read = self._orders[unit], self._read[unit]
        if read:
            return min(len(order), read + max(FIRST_LOOK, int(read * GROWTH)))
        seen: set[str] = set()
        missing = {name for name, task in self._stopping.tasks.items() if task.unit == unit}
        for count, (task, _) in enumerate(order, 1):
            seen.add(task)
            if count >= FIRST_LOOK and seen >= missing:
                return count
        return len(order)

    def _judged(self, unit: str, scores: Mapping[str, Mapping[int, float]]) -> Look:
        rule, documents = self._stopping, self._orders[unit][: self._read[unit]]
        gains = np.array(
            [
                rule.tasks[task].sign * (scores[task][document] - rule.tasks[task].scores[document])
                for task, document in documents
            ]
        )
        values, counts = np.unique(gains, return_counts=True)
        low, high = anytime_interval(counts, rule.alpha, gains=values)
        failed = decide_now(counts, rule.margin, rule.alpha / len(self._units), gains=values) == "FAIL"
        outcome: Outcome = "FAIL" if failed else "PASS" if low > -rule.margin else "INCONCLUSIVE"
        of = len(self._orders[unit])
        return Look(task=unit, read=len(documents), of=of, low=low, high=high, outcome=outcome)


def write_looks(folder: Path, looks: tuple[Look, ...]) -> None:
    """Put them next to lm-eval's results."""
    write_text(folder / FILE, to_json(Looks(looks=looks)))


def read_looks(folder: Path) -> tuple[Look, ...]:
    """What `write_looks` wrote; nothing in a folder made elsewhere."""
    return from_json(Looks, folder / FILE).looks if (folder / FILE).is_file() else ()


def look_line(look: Look, margin: float) -> str:
    """The interval against the margin, in points: what is seen narrowing while documents are read.

    Drawn over four margins to either side of no change, `!` at the margin. A display moves one line for each
    task: `reading addition [--!--====|===-----] -0.61 to +0.35 points, margin -2.00, open`.
    """
    state = {"PASS": "decided: PASS", "FAIL": "decided: FAIL", "INCONCLUSIVE": "open"}[look.outcome]
    low, high = (f"{100 * bound:+.2f}" for bound in (look.low, look.high))
    drawn = _drawn(look, margin)
    interval = f"[{drawn}] {low} to {high} points, margin {-100 * margin:+.2f}"
    return f"reading {look.task}{PROGRESS_DETAIL}{interval}, {state}"


def _drawn(look: Look, margin: float) -> str:
    """The interval as text, PLACES wide."""
    edge = 4 * margin or 0.1
    low, high, limit, zero = (
        round((PLACES - 1) * (min(edge, max(-edge, value)) / edge + 1) / 2)
        for value in (look.low, look.high, -margin, 0.0)
    )
    marks = {zero: "|", limit: "!"}
    return "".join(marks.get(at, "=" if low <= at <= high else "-") for at in range(PLACES))


def require_unit_range(where: str, metric: str, scores: Iterable[float]) -> None:
    """InputError where a score lies outside [0, 1]: bets need to know the most that can be lost."""
    if not all(0 <= score <= 1 for score in scores):
        got, fix = f"{metric} beyond 0 and 1", "set stopping to fixed, or choose another gate"
        raise InputError(where, got=got, need="scores in [0, 1] to stop early", fix=fix)


def _references(folder: Path, choice: Choice) -> Iterator[tuple[str, Reference]]:
    results = read_results(folder)
    for gated in gated_tasks(results, results, choice):
        gate = gated.gate
        if not isinstance(gate, TaskPair):
            where, fix = f"{results.file}: task {gate.task}", "evaluate it with --log_samples"
            raise InputError(where, got="no samples", need="them, to stop early", fix=fix)
        members = (gate.task,) if gate.task in results.tasks else results.groups[gate.task]
        for name in members:
            samples = results.tasks[name].samples.values()
            scores = {
                sample.doc_id: sample.scores[gate.metric]
                for sample in samples
                if sample.filter == gate.filter
            }
            yield (
                name,
                Reference(
                    unit=gate.task, metric=gate.metric, filter=gate.filter, sign=gate.sign, scores=scores
                ),
            )


def _accepted_references(path: Path) -> Iterator[tuple[str, Reference]]:
    accepted = read_accepted(path)
    units = {member: group for group, members in accepted.groups.items() for member in members}
    for name, task in accepted.tasks.items():
        scores = {document: score for document, (score, _) in stored_scores(task).items()}
        sign = 1 if task.higher_is_better else -1
        yield (
            name,
            Reference(
                unit=units.get(name, name), metric=task.metric, filter=task.filter, sign=sign, scores=scores
            ),
        )
