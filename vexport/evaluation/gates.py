"""The metric and filter that decide for each task, and the tasks that are judged as one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vexport.errors import InputError, raise_all
from vexport.evaluation.fingerprint import causes
from vexport.evaluation.pairs import TaskPair, join_group, pair_metrics
from vexport.evaluation.results import Results

PREFERRED_METRICS = ("exact_match", "acc", "pass@1", "pass_at_1")
"""What gates where a task has it, in this order: `acc` rather than `acc_norm`, as the task itself scores.

Then comes the first metric of only 0 and 1 with higher being better, then any of one number a document; of
several filters the first that the task lists.
"""
EVERY_TASK = "*"

Choice = Mapping[str, str]
"""Task or group (or `*`, wherever it exists) -> `metric` or `metric,filter`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedTask:
    """The metric that decides for a task or a group, and those that are shown next to it."""

    gate: TaskPair
    also: tuple[TaskPair, ...]


def gated_tasks(baseline: Results, candidate: Results, choice: Choice) -> tuple[GatedTask, ...]:
    """One gate for each task; a group with an aggregate in lm-eval counts as one task.

    `choice` names gates other than those of PREFERRED_METRICS. InputError, for all tasks at once: tasks
    that one run lacks, documents that differ, tasks without a number a document, a choice that no task has.
    """
    _require_equal_tasks(baseline, candidate)
    units = list(_units(baseline))
    _require_known(choice, [name for name, _ in units])
    by_name: list[tuple[str, list[TaskPair]]] = []
    problems: list[InputError] = []
    for name, members in units:
        try:
            by_name.append((name, _compared(name, members, baseline, candidate)))
        except InputError as problem:
            problems.append(problem)
    raise_all(problems)
    _require_a_home(choice, [pair for _, metrics in by_name for pair in metrics])
    gated = []
    for name, metrics in by_name:
        wanted = choice.get(name)
        options = [pair for pair in metrics if pair.task == name]
        gate = _named(name, wanted, options) if wanted else _preferred(options, choice.get(EVERY_TASK))
        others = [pair for pair in metrics if pair is not gate]
        rest = [pair for pair in others if pair.task == name or pair.key == gate.key]
        gated.append(GatedTask(gate=gate, also=tuple(rest)))
    return tuple(gated)


def label(pair: TaskPair) -> str:
    """`metric,filter` as a choice names it."""
    return f"{pair.metric},{pair.filter}"


def _units(results: Results) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (name, tasks): lm-eval's groups, the earlier one where two share a task, then the other tasks."""
    done: set[str] = set()
    for group, members in results.groups.items():
        if not done & set(members):
            done |= set(members)
            yield group, members
    yield from ((name, (name,)) for name in results.tasks if name not in done)


def _compared(name: str, members: Sequence[str], baseline: Results, candidate: Results) -> list[TaskPair]:
    """Every metric of a task; for a group the joined ones, then its tasks' own."""
    sides = baseline.fingerprint, candidate.fingerprint
    pairs = [
        list(pair_metrics(baseline.tasks[member], candidate.tasks[member], changed=causes(*sides, member)))
        for member in members
    ]
    metrics = list(_with_joined(name, pairs))
    if any(metric.task == name for metric in metrics):
        return metrics
    fix = "give a task with a metric for each document, such as acc or exact_match, and log its samples"
    got = "no metric that all its tasks share" if len(members) > 1 else "metrics of the whole corpus only"
    raise InputError(f"{baseline.file}: task {name}", got=got, need="one number a document", fix=fix)


def _with_joined(name: str, metrics: Sequence[Sequence[TaskPair]]) -> Iterator[TaskPair]:
    if len(metrics) == 1 and all(pair.task == name for pair in metrics[0]):
        yield from metrics[0]
        return
    for first in metrics[0]:
        same = [pair for member in metrics for pair in member if pair.key == first.key]
        if len(same) == len(metrics):
            yield join_group(name, same)
    yield from (pair for member in metrics for pair in member)


def _preferred(options: Sequence[TaskPair], everywhere: str | None) -> TaskPair:
    chosen = [pair for pair in options if everywhere and _matches(pair, everywhere)]
    return chosen[0] if chosen else min(options, key=_preference)


def _preference(pair: TaskPair) -> tuple[int, bool, bool]:
    is_preferred = pair.metric in PREFERRED_METRICS
    rank = PREFERRED_METRICS.index(pair.metric) if is_preferred else len(PREFERRED_METRICS)
    return rank, not pair.binary, pair.sign < 0


def _matches(pair: TaskPair, wanted: str) -> bool:
    return wanted in (pair.metric, label(pair))


def _named(name: str, wanted: str, options: Sequence[TaskPair]) -> TaskPair:
    for pair in options:
        if _matches(pair, wanted):
            return pair
    need = f"one of {', '.join(map(label, options))}"
    raise InputError(f"gate of task {name}", got=wanted, need=need, fix="name one of these")


def _require_known(choice: Choice, names: Sequence[str]) -> None:
    unknown = [name for name in choice if name not in (*names, EVERY_TASK)]
    need, fix = f"one of {', '.join(names)}", "name one of these; a group is named as a whole"
    raise_all([InputError("gate", got=f"no task {name}", need=need, fix=fix) for name in unknown])


def _require_a_home(choice: Choice, metrics: Sequence[TaskPair]) -> None:
    wanted = choice.get(EVERY_TASK)
    if wanted and not any(_matches(pair, wanted) for pair in metrics):
        need = f"one of {', '.join(dict.fromkeys(map(label, metrics)))}"
        raise InputError("gate", got=f"{wanted}, which no task has", need=need, fix="name one of these")


def _require_equal_tasks(baseline: Results, candidate: Results) -> None:
    for first, other in ((baseline, candidate), (candidate, baseline)):
        if missing := sorted(set(first.tasks) - set(other.tasks)):
            got = f"no task {', '.join(missing)}, which {first.file} has"
            raise InputError(str(other.file), got=got, need="the same tasks", fix="evaluate the same tasks")
