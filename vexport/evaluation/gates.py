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
    """What decides for a task or a group, and what is shown beside it."""

    gate: Compared
    also: tuple[Compared, ...]


def gated_tasks(
    baseline: Results, candidate: Results, choice: Choice, *, early: bool = False
) -> tuple[GatedTask, ...]:
    """One gate for each task; a group with an aggregate in lm-eval counts as one task.

    Tasks without samples on a side are compared by their means. `choice` names gates other than those of
    PREFERRED_METRICS; with `early`, the candidate stopped when it was decided. InputError, for all tasks at
    once: tasks that one run lacks, documents that differ, tasks without a number a document, a choice that
    no task has.
    """
    _require_equal_tasks(baseline, candidate)
    units = list(_units(baseline))
    _require_known(choice, [name for name, _ in units])
    made: list[tuple[str, list[Compared]]] = []
    problems: list[InputError] = []
    for name, members in units:
        try:
            made.append((name, _compared(name, members, baseline, candidate, early)))
        except InputError as problem:
            problems.append(problem)
    raise_all(problems)
    _require_a_home(choice, [compared for _, found in made for compared in found])
    gated = []
    for name, found in made:
        wanted = choice.get(name)
        options = [one for one in found if one.task == name]
        gate = _named(name, wanted, options) if wanted else _preferred(options, choice.get(EVERY_TASK))
        rest = [one for one in found if one is not gate and (one.task == name or one.key == gate.key)]
        gated.append(GatedTask(gate=gate, also=tuple(rest)))
    return tuple(gated)


def label(one: Compared) -> str:
    """`metric,filter` as a choice names it."""
    return f"{one.metric},{one.filter}"


def _units(results: Results) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (name, tasks): lm-eval's groups, the earlier one where two share a task, then the other tasks."""
    done: set[str] = set()
    for group, members in results.groups.items():
        if not done & set(members):
            done |= set(members)
            yield group, members
    yield from ((name, (name,)) for name in results.summaries if name not in done)


def _compared(
    name: str, members: Sequence[str], baseline: Results, candidate: Results, early: bool
) -> list[Compared]:
    """Every metric of a task; for a group the joined ones, then its tasks' own."""
    if all(member in run.tasks for member in members for run in (baseline, candidate)):
        sides = baseline.fingerprint, candidate.fingerprint
        pairs = [
            list(
                pair_metrics(
                    baseline.tasks[one], candidate.tasks[one], early=early, changed=causes(*sides, one)
                )
            )
            for one in members
        ]
        found: list[Compared] = [*_with_joined(name, pairs, join_group)]
    else:
        _require_the_same_prompts(members, baseline, candidate)
        means = [list(unpaired_metrics(baseline, candidate, one)) for one in members]
        found = [*_with_joined(name, means, join_unpaired)]
    if any(one.task == name for one in found):
        return found
    fix = "give a task with a metric for each document, such as acc or exact_match, and log its samples"
    got = "no metric that all its tasks share" if len(members) > 1 else "metrics of the whole corpus only"
    raise InputError(f"{baseline.file}: task {name}", got=got, need="one number a document", fix=fix)


def _require_the_same_prompts(members: Sequence[str], baseline: Results, candidate: Results) -> None:
    """Without samples nobody sees the prompts: InputError where what lm-eval records makes them differ."""
    for task in members:
        if differ := prompt_changes(baseline.fingerprint, candidate.fingerprint, task):
            place, need = f"{candidate.file}: task {task}", "the same prompts for both models"
            fix = "evaluate both alike; samples (--log_samples) would show whether the prompts differ"
            raise InputError(place, got=", ".join(differ), need=need, fix=fix)


def _with_joined(
    name: str, found: Sequence[Sequence[Kind]], join: Callable[[str, Sequence[Kind]], Kind]
) -> Iterator[Kind]:
    if len(found) == 1 and all(one.task == name for one in found[0]):
        yield from found[0]
        return
    for first in found[0]:
        same = [one for member in found for one in member if one.key == first.key]
        if len(same) == len(found):
            yield join(name, same)
    yield from (one for member in found for one in member)


def _preferred(options: Sequence[Compared], everywhere: str | None) -> Compared:
    chosen = [one for one in options if everywhere and _matches(one, everywhere)]
    return chosen[0] if chosen else min(options, key=_preference)


def _preference(one: Compared) -> tuple[int, bool, bool]:
    known = one.metric in PREFERRED_METRICS
    rank = PREFERRED_METRICS.index(one.metric) if known else len(PREFERRED_METRICS)
    return rank, not one.binary, one.sign < 0


def _matches(one: Compared, wanted: str) -> bool:
    return wanted in (one.metric, label(one))


def _named(name: str, wanted: str, options: Sequence[Compared]) -> Compared:
    for one in options:
        if _matches(one, wanted):
            return one
    need = f"one of {', '.join(map(label, options))}"
    raise InputError(f"gate of task {name}", got=wanted, need=need, fix="name one of these")


def _require_known(choice: Choice, names: Sequence[str]) -> None:
    unknown = [name for name in choice if name not in (*names, EVERY_TASK)]
    need, fix = f"one of {', '.join(names)}", "name one of these; a group is named as a whole"
    raise_all([InputError("gate", got=f"no task {name}", need=need, fix=fix) for name in unknown])


def _require_a_home(choice: Choice, found: Sequence[Compared]) -> None:
    wanted = choice.get(EVERY_TASK)
    if wanted and not any(_matches(one, wanted) for one in found):
        need = f"one of {', '.join(dict.fromkeys(map(label, found)))}"
        raise InputError("gate", got=f"{wanted}, which no task has", need=need, fix="name one of these")


def _require_equal_tasks(baseline: Results, candidate: Results) -> None:
    for one, other in ((baseline, candidate), (candidate, baseline)):
        if missing := sorted(set(one.summaries) - set(other.summaries)):
            got = f"no task {', '.join(missing)}, which {one.file} has"
            raise InputError(str(other.file), got=got, need="the same tasks", fix="evaluate the same tasks")
