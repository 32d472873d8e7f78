"""Which metric and filter decide for each task, and which tasks are judged as one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vexport.errors import InputError, raise_all
from vexport.evaluation.fingerprint import causes, prompt_changes
from vexport.evaluation.pairs import TaskPair, join_group, pair_metrics
from vexport.evaluation.results import Results
from vexport.evaluation.unpaired import UnpairedTask, join_unpaired, unpaired_metrics

PREFERRED_METRICS = ("exact_match", "acc", "pass@1", "pass_at_1")
"""What gates where a task has it, in this order: `acc` rather than `acc_norm`, as the task itself scores.

Then comes the first metric of only 0 and 1 with higher being better, then any of one number a document; of
several filters the first that the task lists.
"""
EVERY_TASK = "*"

Compared = TaskPair | UnpairedTask
Kind = TypeVar("Kind", TaskPair, UnpairedTask)
Choice = Mapping[str, str]
"""Task or group (or `*`, wherever it exists) -> `metric` or `metric,filter`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedTask:
    """What decides for a task or a group, and what is shown next to it."""

    gate: Compared
    also: tuple[Compared, ...]


def gated_tasks(baseline: Results, candidate: Results, choice: Choice) -> tuple[GatedTask, ...]:
    """One gate for each task; a group with an aggregate in lm-eval counts as one task.

    Tasks without samples on a side are compared by their means. `choice` names gates other than those of
    PREFERRED_METRICS. InputError, for all tasks at once: tasks that one run lacks, documents that differ,
    tasks without a number a document, a choice that no task has.
    """
    _require_equal_tasks(baseline, candidate)
    units = list(_units(baseline))
    _require_known(choice, [name for name, _ in units])
    by_name: list[tuple[str, list[Compared]]] = []
    problems: list[InputError] = []
    for name, members in units:
        try:
            by_name.append((name, _compared(name, members, baseline, candidate)))
        except InputError as problem:
            problems.append(problem)
    raise_all(problems)
    _require_a_home(choice, [compared for _, metrics in by_name for compared in metrics])
    gated = []
    for name, metrics in by_name:
        wanted = choice.get(name)
        options = [compared for compared in metrics if compared.task == name]
        gate = _named(name, wanted, options) if wanted else _preferred(options, choice.get(EVERY_TASK))
        others = [compared for compared in metrics if compared is not gate]
        rest = [compared for compared in others if compared.task == name or compared.key == gate.key]
        gated.append(GatedTask(gate=gate, also=tuple(rest)))
    return tuple(gated)


def label(compared: Compared) -> str:
    """`metric,filter` as a choice names it."""
    return f"{compared.metric},{compared.filter}"


def _units(results: Results) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (name, tasks): lm-eval's groups, the earlier one where two share a task, then the other tasks."""
    done: set[str] = set()
    for group, members in results.groups.items():
        if not done & set(members):
            done |= set(members)
            yield group, members
    yield from ((name, (name,)) for name in results.summaries if name not in done)


def _compared(name: str, members: Sequence[str], baseline: Results, candidate: Results) -> list[Compared]:
    """Every metric of a task; for a group the joined ones, then its tasks' own."""
    if all(member in run.tasks for member in members for run in (baseline, candidate)):
        sides = baseline.fingerprint, candidate.fingerprint
        pairs = [
            list(pair_metrics(*tasks, changed=causes(*sides, member)))
            for member, tasks in ((name, (baseline.tasks[name], candidate.tasks[name])) for name in members)
        ]
        metrics: list[Compared] = [*_with_joined(name, pairs, join_group)]
    else:
        _require_the_same_prompts(members, baseline, candidate)
        means = [list(unpaired_metrics(baseline, candidate, member)) for member in members]
        metrics = [*_with_joined(name, means, join_unpaired)]
    if any(metric.task == name for metric in metrics):
        return metrics
    fix = "give a task with a metric for each document, such as acc or exact_match, and log its samples"
    got = "no metric that all its tasks share" if len(members) > 1 else "metrics of the whole corpus only"
    raise InputError(f"{baseline.file}: task {name}", got=got, need="one number a document", fix=fix)


def _require_the_same_prompts(members: Sequence[str], baseline: Results, candidate: Results) -> None:
    """Without samples nobody sees the prompts: InputError where what lm-eval records makes them differ."""
    for task in members:
        if differ := prompt_changes(baseline.fingerprint, candidate.fingerprint, task):
            where, need = f"{candidate.file}: task {task}", "the same prompts for both models"
            fix = "evaluate both alike; samples (--log_samples) would show whether the prompts differ"
            raise InputError(where, got=", ".join(differ), need=need, fix=fix)


def _with_joined(
    name: str, metrics: Sequence[Sequence[Kind]], join: Callable[[str, Sequence[Kind]], Kind]
) -> Iterator[Kind]:
    if len(metrics) == 1 and all(compared.task == name for compared in metrics[0]):
        yield from metrics[0]
        return
    for first in metrics[0]:
        same = [compared for member in metrics for compared in member if compared.key == first.key]
        if len(same) == len(metrics):
            yield join(name, same)
    yield from (compared for member in metrics for compared in member)


def _preferred(options: Sequence[Compared], everywhere: str | None) -> Compared:
    chosen = [compared for compared in options if everywhere and _matches(compared, everywhere)]
    return chosen[0] if chosen else min(options, key=_preference)


def _preference(compared: Compared) -> tuple[int, bool, bool]:
    is_preferred = compared.metric in PREFERRED_METRICS
    rank = PREFERRED_METRICS.index(compared.metric) if is_preferred else len(PREFERRED_METRICS)
    return rank, not compared.binary, compared.sign < 0


def _matches(compared: Compared, wanted: str) -> bool:
    return wanted in (compared.metric, label(compared))


def _named(name: str, wanted: str, options: Sequence[Compared]) -> Compared:
    for compared in options:
        if _matches(compared, wanted):
            return compared
    need = f"one of {', '.join(map(label, options))}"
    raise InputError(f"gate of task {name}", got=wanted, need=need, fix="name one of these")


def _require_known(choice: Choice, names: Sequence[str]) -> None:
    unknown = [name for name in choice if name not in (*names, EVERY_TASK)]
    need, fix = f"one of {', '.join(names)}", "name one of these; a group is named as a whole"
    raise_all([InputError("gate", got=f"no task {name}", need=need, fix=fix) for name in unknown])


def _require_a_home(choice: Choice, metrics: Sequence[Compared]) -> None:
    wanted = choice.get(EVERY_TASK)
    if wanted and not any(_matches(compared, wanted) for compared in metrics):
        need = f"one of {', '.join(dict.fromkeys(map(label, metrics)))}"
        raise InputError("gate", got=f"{wanted}, which no task has", need=need, fix="name one of these")


def _require_equal_tasks(baseline: Results, candidate: Results) -> None:
    for first, other in ((baseline, candidate), (candidate, baseline)):
        if missing := sorted(set(first.summaries) - set(other.summaries)):
            got = f"no task {', '.join(missing)}, which {first.file} has"
            raise InputError(str(other.file), got=got, need="the same tasks", fix="evaluate the same tasks")
