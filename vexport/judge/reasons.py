"""Choose the rule that justifies an outcome over all tasks, and collect its facts.

Differences of shares are in points. Other differences have the metric's unit or name. The worst
task is the task with the lowest bound, as a share of its margin.
"""

from collections.abc import Sequence

from vexport.inference.shipped import SHIPPED, shipped_task
from vexport.inference.shipped.base import PartOutcome
from vexport.judge.lost import too_many_lost_text
from vexport.records import Outcome, Reason, TaskVerdict
from vexport.records.values import about, join_limited
from vexport.rules import verdict
from vexport.scores.settings import MAX_NAMED
from vexport.words import plural

_NEVER = "at this difference no number of documents would settle it"


def reason_for(outcome: Outcome, tasks: Sequence[TaskVerdict]) -> Reason:
    """Return the reason for the outcome over all tasks."""
    makers = {"PASS": _pass_reason, "FAIL": _fail_reason, "INCONCLUSIVE": _inconclusive_reason}
    return makers[outcome](tasks, _assumed_text(tasks))


def _assumed_text(tasks: Sequence[TaskVerdict]) -> str:
    """Return a clause on metrics whose direction nothing states, or ""."""
    assumed = [task.task for task in tasks if task.direction_assumed]
    if not assumed:
        return ""
    names = "" if len(tasks) == 1 else f" for {join_limited(assumed, ' and ', MAX_NAMED)}"
    return f"; direction assumed{names}: higher is better"


def _pass_reason(tasks: Sequence[TaskVerdict], assumed: str) -> Reason:
    worst = min(tasks, key=lambda task: task.share_of_margin(task.low))
    change, bound = _change_and_bound(worst)
    if len(tasks) == 1:
        return Reason.of(
            verdict.WITHIN_MARGIN,
            task=worst.task,
            change=change,
            bound=bound,
            limit=worst.scale.limit,
            more=assumed,
        )
    return Reason.of(
        verdict.ALL_WITHIN_MARGIN,
        tasks=_all_tasks(tasks),
        loss=_loss_compared_to_margin("less", tasks, "lose nothing"),
        task=worst.task,
        change=change,
        bound=bound,
        more=assumed,
    )


def _fail_reason(tasks: Sequence[TaskVerdict], assumed: str) -> Reason:
    failed = [task for task in tasks if task.outcome == "FAIL"]
    worst = min(failed, key=lambda task: task.share_of_margin(task.high))
    scale = worst.scale
    amount = f"{scale.number(-worst.difference)} {scale.unit}"
    least = scale.number(-worst.high)
    faults = _faults_text(tasks)
    by_obstacle = [task for task in failed if _has_own_obstacle(task)]
    if by_obstacle:
        others = [task for task in tasks if task is not by_obstacle[0]]
        obstacle = by_obstacle[0].obstacle
        assert obstacle is not None
        left = f"; {reason_for('FAIL', others).text}" if len(failed) > 1 else ""
        text = f"{by_obstacle[0].task} {obstacle.text}{left}{assumed}"
        return Reason(rule=obstacle.rule, text=text)
    if len(failed) == 1:
        return Reason.of(
            verdict.LOSS,
            task=worst.task,
            amount=amount,
            least=least,
            limit=scale.limit,
            more=f"{_lost_text(worst)}{_other_tasks_text(tasks, 'FAIL')}{faults}{assumed}",
        )
    every = len(failed) == len(tasks)
    return Reason.of(
        verdict.LOSSES,
        tasks=_all_tasks(tasks) if every else f"{len(failed)} of {len(tasks)} tasks",
        loss=_loss_compared_to_margin("more", failed, "lose something"),
        task=worst.task,
        amount=amount,
        least=least,
        more=f"{faults}{assumed}",
    )


def _faults_text(tasks: Sequence[TaskVerdict]) -> str:
    """Return a clause on the faults of the candidate's responses to shipped tasks, or ""."""
    parts: dict[str, list[PartOutcome]] = {}
    for task in tasks:
        if (shipped := shipped_task(task.task)) is not None:
            outcome = PartOutcome(
                name=task.task,
                outcome=task.outcome,
                documents=task.documents * task.seeds,
                faults=task.faults,
            )
            parts.setdefault(shipped.name, []).append(outcome)
    clauses = [SHIPPED[name].explain_loss(outcomes) for name, outcomes in parts.items()]
    return "".join(f"; {clause}" for clause in clauses if clause)


def _has_own_obstacle(task: TaskVerdict) -> bool:
    """Return True if a task failed because of its obstacle, whatever the interval."""
    return task.obstacle is not None and task.obstacle.rule != verdict.LOST_RESPONSES.id


def _lost_text(task: TaskVerdict) -> str:
    if task.obstacle is None or task.answers is None or _has_own_obstacle(task):
        return ""
    return f"; {too_many_lost_text(task.answers)}"


def _inconclusive_reason(tasks: Sequence[TaskVerdict], assumed: str) -> Reason:
    """Return the reason of the first kind: tasks with an obstacle, then tasks that are open."""
    of_response = verdict.LOST_RESPONSES.id
    blocked = [task for task in tasks if task.obstacle is not None and task.outcome != "FAIL"]
    without_room = [task for task in blocked if task.obstacle and task.obstacle.rule != of_response]
    first = without_room or blocked
    if not first:
        return _open_reason(tasks, assumed)
    named = set(map(id, first))
    rest = [task for task in tasks if id(task) not in named]
    others = [task for task in rest if task.outcome == "INCONCLUSIVE"]
    left = _other_tasks_text(tasks, "INCONCLUSIVE")
    if others:
        left = f"; {_inconclusive_reason(others if without_room else rest, '').text}"
    names = join_limited([task.task for task in first], " and ", MAX_NAMED)
    obstacle = first[0].obstacle
    assert obstacle is not None
    verb = "" if without_room else " has" if len(first) == 1 else " have"
    return Reason(rule=obstacle.rule, text=f"{names}{verb} {obstacle.text}{left}{assumed}")


def _open_reason(tasks: Sequence[TaskVerdict], assumed: str) -> Reason:
    unsettled = [task for task in tasks if task.outcome == "INCONCLUSIVE"]
    if len(unsettled) > 1:
        named = [f"{task.task} ({_needed_documents(task)})" for task in unsettled]
        return Reason.of(
            verdict.SEVERAL_NOT_SETTLED,
            count=len(unsettled),
            total=len(tasks),
            tasks=join_limited(named, ", ", MAX_NAMED),
            more=assumed,
        )
    (task,) = unsettled
    scale = task.scale
    return Reason.of(
        verdict.NOT_SETTLED,
        task=task.task,
        documents=task.documents,
        change=f"{scale.signed(task.difference)} {scale.unit}",
        low=scale.signed(task.low),
        high=scale.signed(task.high),
        limit=scale.limit,
        remedy=_remedy(task),
        more=f"{_other_tasks_text(tasks, 'INCONCLUSIVE')}{assumed}",
    )


def _remedy(task: TaskVerdict) -> str:
    needed = task.needed
    if needed is None:
        return _NEVER
    if not needed.is_available:
        return needed.remedy
    seeds = f", or {needed.seeds:,} seeds," if needed.seeds else ""
    return f"{about(needed.documents)}{seeds} would settle it"


def _needed_documents(task: TaskVerdict) -> str:
    """Return how many documents of a task were read, and how many would settle it."""
    needed, read = task.needed, f"{plural(task.documents, 'document')} read"
    if needed is None:
        return f"{read}; {_NEVER}"
    return f"{read}, {about(needed.documents)} needed" if needed.is_available else needed.remedy


def _loss_compared_to_margin(word: str, tasks: Sequence[TaskVerdict], nothing: str) -> str:
    """Return `lose less than 2 points or 1%`, or the text `nothing` if all margins are 0."""
    if not any(task.margin for task in tasks):
        return nothing
    limits = dict.fromkeys(task.scale.short_limit for task in tasks)
    return f"lose {word} than {' or '.join(limits)}"


def _all_tasks(tasks: Sequence[TaskVerdict]) -> str:
    return "both tasks" if len(tasks) == 2 else f"all {len(tasks)} tasks"


def _change_and_bound(task: TaskVerdict) -> tuple[str, str]:
    """Return `loses 0.43 points` and `at most 0.84`, or the corresponding texts for a gain."""
    scale = task.scale
    difference = float(scale.number(task.difference))
    if difference < 0:
        change = f"loses {scale.number(-task.difference)} {scale.unit}"
        return change, f"at most {scale.number(-task.low)}"
    if not difference:
        return "loses nothing", f"at most {scale.number(max(0.0, -task.low))} {scale.unit}"
    change = f"gains {scale.number(task.difference)} {scale.unit}"
    if task.low >= 0:
        return change, f"at least {scale.number(task.low)}"
    return change, f"at worst it loses {scale.number(-task.low)}"


def _other_tasks_text(tasks: Sequence[TaskVerdict], outcome: Outcome) -> str:
    """Return a sentence on the other tasks if all of them pass, else ""."""
    others = [task for task in tasks if task.outcome != outcome]
    if not others or {task.outcome for task in others} != {"PASS"}:
        return ""
    return (
        "; the other task passes" if len(others) == 1 else f"; the other {len(others)} tasks pass"
    )
