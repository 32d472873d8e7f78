"""Decide PASS, FAIL or INCONCLUSIVE from two runs of a harness on the same documents.

With several tasks, the verdict is PASS if every task passes. Such an intersection-union test needs
no correction for the number of tasks (Berger, Technometrics 24, 1982). Therefore each lower bound
is at 1 - alpha. If a model loses more than the margin on any task, the probability of PASS is at
most alpha.

The verdict is FAIL if any task fails. Therefore the upper bounds are corrected by Holm's procedure
(Scandinavian Journal of Statistics 6, 1979). A task's upper bound is at the level of the last step
in which the procedure tested the task. The task fails exactly if this bound, which reports show, is
below -margin.

The verdict's reason is a short sentence. Differences of shares are in points. Other differences
have the metric's unit or name. Reports show intervals, levels and p values in tables.
"""

import gc
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from vexport.errors import InputError, raise_all
from vexport.errors.extras import attempt_all
from vexport.inference.repeated import require_deterministic
from vexport.judge.margin_checks import margin_changes, require_fitting
from vexport.judge.pairs import TaskPair, gated_tasks, pool
from vexport.judge.same_response import same_response_warnings
from vexport.judge.task_verdict import (
    compare_task,
    comparison,
    difference_interval,
    margin_amount,
)
from vexport.records import Comparison, Outcome, Prompting, TaskVerdict, TextLimit, Verdict
from vexport.records.chosen_metric import Choice
from vexport.records.margin import EVERY_TASK, Margins, MarginSetting
from vexport.records.scale import Scale
from vexport.records.values import about, join_limited, plural
from vexport.scores.readers.accepted import gate_contradictions, read_accepted_table
from vexport.scores.readers.lm_eval import read_lm_eval
from vexport.scores.reading import read_baseline, read_scores
from vexport.scores.settings import MAX_NAMED, changes_by_task, device_of
from vexport.scores.shared_tasks import shared_tasks
from vexport.scores.table import ScoreTable

NO_CHOICE: Choice = MappingProxyType({})
# What the two sides of a change are called, without and with an accepted baseline.
_WHERE = (("in the baseline", "in the results"), ("when the baseline was accepted", "now"))


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Pause the search for reference cycles. It takes half of the time to read large results."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_paused_collector()
def decide(
    baseline: Path,
    candidate: Path,
    *,
    margin: MarginSetting,
    alpha: float,
    gate: Choice = NO_CHOICE,
    tasks: Sequence[str] = (),
) -> Verdict:
    """Compare results of two models, or a model's results with an accepted baseline.

    The results are those of lm-eval, lighteval, EvalScope, or plain JSON lines.

    - `margin` is the acceptable loss, for all tasks or by task. 0.02 is 2 points of accuracy. `1%`
      is 1 % of the baseline's value, for a metric that is not a share. None means the accepted
      baseline's margin, or else the default for both kinds.
    - `alpha` is the probability of a wrong PASS, and of a wrong FAIL, below 0.5.
    - `gate` is the metric that decides for a task (pairs.py).
    - `tasks` are the tasks and groups to judge, all of both sides by default. If a side lacks a
      task, the verdict names the task and is no PASS.

    Raises:
        InputError: If the runs cannot be compared.
        EnvironmentFault: If the engine is not deterministic: repeated responses differ too often.
    """
    left, right = attempt_all(
        (
            (str(baseline), partial(read_baseline, baseline, tasks)),
            (str(candidate), partial(read_scores, candidate, tasks)),
        )
    )
    if left.harness != right.harness:
        got = f"results of {right.harness}, and the baseline's are of {left.harness}"
        fix = "evaluate both models with the same harness"
        raise InputError(str(candidate), got=got, need="results of a single harness", fix=fix)
    repeated = _repeatability_text(left, "baseline", alpha)
    repeated += _repeatability_text(right, "candidate", alpha)
    raise_all([*gate_contradictions(left.gates, gate)])
    names, missing = shared_tasks(left, right, (baseline, candidate), tasks)
    gates = gated_tasks(left.only(names), right.only(names), gate)
    stored = Margins.read(left.margin).only([gate.task for gate in gates])
    margins = stored if margin is None else Margins.read(margin)
    require_fitting(gates, margins)
    require_fitting(gates, stored)
    verdict = judge(gates, margins=margins, alpha=alpha, prompting=right.prompting)
    verdict = _without_missing_tasks(verdict, missing)
    warnings = (
        *(margin_changes(gates, margins, stored) if left.margin is not None else ()),
        *same_response_warnings(gates),
        *_direction_warnings(verdict),
        *left.replaced,
        *right.replaced,
        *changes_by_task(
            {name: (left.tasks[name].fingerprint, right.tasks[name].fingerprint) for name in names},
            where=_WHERE[left.identity is not None],
        ),
        *_lost_warnings(verdict),
        *right.warnings,
    )
    return replace(
        verdict,
        method=verdict.method + repeated,
        warnings=warnings,
        prompting=right.prompting,
        device=device_of(right.fingerprint),
        measured=right.measured_at,
        fingerprint=right.fingerprint,
        baseline_fingerprint=left.fingerprint,
        accepted=left.identity,
    )


def _without_missing_tasks(verdict: Verdict, missing: Sequence[str]) -> Verdict:
    """Return the verdict with the tasks that a side lacks in its reason. It is no PASS then."""
    if not missing:
        return verdict
    lacking = "; ".join(missing)
    if verdict.outcome == "FAIL":
        return replace(verdict, reason=f"{verdict.reason}; {lacking}")
    advice = "evaluate the same tasks, or select some with --task"
    reason = f"{lacking} ({advice}); {verdict.reason}"
    return replace(verdict, outcome="INCONCLUSIVE", reason=reason)


def tasks_without_loss(path: Path, folder: Path, alpha: float) -> Iterator[str]:
    """Describe the tasks of an accepted baseline that cannot show a loss of a later candidate.

    `folder` has the results that were accepted.
    """
    accepted, results = read_accepted_table(path), read_lm_eval(folder)
    gates = gated_tasks(accepted, results, NO_CHOICE)
    margins = Margins.read(accepted.margin)
    require_fitting(gates, margins)
    for task in judge(gates, margins=margins, alpha=alpha, prompting=results.prompting).tasks:
        if task.uninformative:
            yield f"{task.task} cannot show a loss: {task.uninformative}"


def _direction_warnings(verdict: Verdict) -> Iterator[str]:
    """Yield a warning for every metric that is assumed to be better if it is higher."""
    tasks: dict[str, list[str]] = {}
    for task in verdict.tasks:
        if task.direction_assumed:
            tasks.setdefault(task.metric, []).append(task.task)
    for metric, names in tasks.items():
        yield (
            f"{join_limited(names, ' and ', MAX_NAMED)}: the direction of {metric} is assumed: "
            f"higher is better; state it with --gate {metric}:higher or {metric}:lower"
        )


def _lost_warnings(verdict: Verdict) -> Iterator[str]:
    """Yield a warning for every task with lost responses.

    Lost responses that the verdict's reason already describes are skipped.
    """
    for task in verdict.tasks:
        if task.lost_answers and task.lost_answers not in verdict.reason:
            yield f"{task.task}: {task.lost_answers}"


def _repeatability_text(table: ScoreTable, side: str, alpha: float) -> str:
    """Describe how many responses of one model changed when it ran again.

    Return "" if no documents were repeated.

    Raises:
        EnvironmentFault: If the engine is not deterministic.
    """
    repeated = table.repeated
    if repeated is None:
        return ""
    require_deterministic(table.file.parent, repeated, alpha)
    return f"; {side}, run again: {repeated.changed} of {repeated.documents} responses changed"


def judge(
    gates: Sequence[TaskPair],
    *,
    margins: Margins,
    alpha: float,
    prompting: Prompting | None = None,
) -> Verdict:
    """Return the verdict over all tasks. `prompting` has the settings of the prompts."""
    levels = holm_levels(gates, margins=margins, alpha=alpha)
    tasks = tuple(
        compare_task(
            gate,
            margins=margins,
            alpha=alpha,
            fail_alpha=level,
            is_templated=_is_templated(gate.task, prompting),
        )
        for gate, level in zip(gates, levels, strict=True)
    )
    outcome = overall_outcome(tasks)
    return Verdict(
        outcome=outcome,
        reason=reason_for(outcome, tasks),
        margin=margins.of(EVERY_TASK, "share").value,
        alpha=alpha,
        method=_method(gates, alpha),
        tasks=tasks,
        pooled=_pooled(gates, margins, alpha),
    )


def _is_templated(task: str, prompting: Prompting | None) -> bool | None:
    return (
        None
        if prompting is None
        else bool(prompting.chat_template) and task not in prompting.untemplated
    )


def holm_levels(pairs: Sequence[TaskPair], *, margins: Margins, alpha: float) -> list[float]:
    """Return the level of the last test of each task in Holm's procedure.

    Each step tests the remaining tasks for a loss above the margin, at the level alpha / (number of
    remaining tasks). Tasks that fail are removed. The procedure ends if no task fails in a step.
    """
    strengths = [_strength(pair, len(pairs), margins, alpha) for pair in pairs]
    levels = [alpha] * len(pairs)
    remaining = len(pairs)
    order = sorted(range(len(pairs)), key=lambda index: -strengths[index])
    failed = 0
    while remaining:
        level = alpha / remaining
        start = failed
        while failed < len(order) and strengths[order[failed]] >= remaining:
            levels[order[failed]] = level
            failed += 1
        if failed == start:
            for index in order[failed:]:
                levels[index] = level
            break
        remaining = len(pairs) - failed
    return levels


def _strength(pair: TaskPair, tasks: int, margins: Margins, alpha: float) -> int:
    """Return the largest number up to `tasks` so that the task fails at alpha / number, else 0.

    A task that fails at a level also fails at every higher level.
    """
    margin = margin_amount(pair, margins.of(pair.task, pair.unit))

    def fails(number: int) -> bool:
        return difference_interval(pair, alpha / number).high < -margin

    if not fails(1):
        return 0
    if fails(tasks):
        return tasks
    return bisect_left(range(1, tasks), True, key=lambda number: not fails(number))


def overall_outcome(tasks: Sequence[TaskVerdict | TextLimit]) -> Outcome:
    """Return FAIL if any task or measure of text fails, PASS if all pass, else INCONCLUSIVE."""
    outcomes = {task.outcome for task in tasks}
    if "FAIL" in outcomes:
        return "FAIL"
    return "PASS" if outcomes == {"PASS"} else "INCONCLUSIVE"


def _method(gates: Sequence[TaskPair], alpha: float) -> str:
    intervals = " and ".join(dict.fromkeys(map(_interval_name, gates)))
    method = f"paired difference, {intervals}, one-sided {100 * (1 - alpha):.4g}% bounds"
    if len(gates) == 1:
        return method
    return (
        f"{method}; all {len(gates)} tasks must pass; a single task can fail the verdict, so upper "
        f"bounds are corrected for {len(gates)} tasks (Holm)"
    )


def _interval_name(gate: TaskPair) -> str:
    name = "Tango's score interval" if gate.binary else "BCa bootstrap"
    if gate.corpus is not None:
        name = "BCa bootstrap of the corpus"
    if gate.clusters is None:
        return name
    return f"{name} clustered by {'document' if gate.seeds > 1 else 'task'}"


def _pooled(gates: Sequence[TaskPair], margins: Margins, alpha: float) -> Comparison | None:
    """Compare the documents of all tasks together. Return None unless all metrics are 0/1.

    The result is only shown, because the tasks decide. It is also None for a single task.
    """
    pairs = [gate for gate in gates if gate.binary and gate.sign > 0]
    if len(pairs) < len(gates) or len(pairs) == 1:
        return None
    shared = {(pair.metric, pair.filter) for pair in pairs}
    pooled = comparison(pool("all tasks", pairs), margins.of(EVERY_TASK, "share"), alpha)
    return (
        pooled
        if len(shared) == 1
        else replace(pooled, metric="share of correct responses", filter="none")
    )


def reason_for(outcome: Outcome, tasks: Sequence[TaskVerdict]) -> str:
    """Return the reason for the outcome over all tasks, without a full stop."""
    makers = {"PASS": _pass_reason, "FAIL": _fail_reason, "INCONCLUSIVE": _inconclusive_reason}
    return makers[outcome](tasks) + _assumed_text(tasks)


def _assumed_text(tasks: Sequence[TaskVerdict]) -> str:
    """Return a clause on metrics whose direction nothing states, or ""."""
    assumed = [task.task for task in tasks if task.direction_assumed]
    if not assumed:
        return ""
    names = "" if len(tasks) == 1 else f" for {join_limited(assumed, ' and ', MAX_NAMED)}"
    return f"; direction assumed{names}: higher is better"


def _pass_reason(tasks: Sequence[TaskVerdict]) -> str:
    worst = min(tasks, key=lambda task: task.share_of_margin(task.low))
    unit = worst.scale
    if len(tasks) == 1:
        return f"{worst.task} {_change_text(worst, unit)}, {unit.accepted}"
    loss = _loss_compared_to_margin("less", tasks, "lose nothing")
    change, bound = _change_and_bound(worst, unit)
    return f"{_all_tasks(tasks)} {loss} (worst: {worst.task} {change}, {bound})"


def _loss_compared_to_margin(word: str, tasks: Sequence[TaskVerdict], nothing: str) -> str:
    """Return `lose less than 2 points or 1%`, or the text `nothing` if all margins are 0."""
    units = [task.scale for task in tasks]
    if not any(unit.margin for unit in units):
        return nothing
    limits = dict.fromkeys(unit.short_limit for unit in units)
    return f"lose {word} than {' or '.join(limits)}"


def _all_tasks(tasks: Sequence[TaskVerdict]) -> str:
    return "both tasks" if len(tasks) == 2 else f"all {len(tasks)} tasks"


def _fail_reason(tasks: Sequence[TaskVerdict]) -> str:
    failed = [task for task in tasks if task.outcome == "FAIL"]
    worst = min(failed, key=lambda task: task.share_of_margin(task.high))
    unit = worst.scale
    if len(failed) == 1:
        loss = f"{unit.number(-worst.difference)} {unit.unit} (at least {unit.number(-worst.high)})"
        cause = f"; {worst.lost_answers}" if worst.too_many_lost else ""
        return (
            f"{worst.task} loses {loss}, {unit.accepted}{cause}{_other_tasks_text(tasks, 'FAIL')}"
        )
    lost = _loss_compared_to_margin("more", failed, "lose something")
    loss = f"loses {unit.number(-worst.difference)} {unit.unit}"
    bound = f"at least {unit.number(-worst.high)}"
    which = (
        _all_tasks(tasks) if len(failed) == len(tasks) else f"{len(failed)} of {len(tasks)} tasks"
    )
    return f"{which} {lost} (worst: {worst.task} {loss}, {bound})"


def _inconclusive_reason(tasks: Sequence[TaskVerdict]) -> str:
    uninformative = [task for task in tasks if task.uninformative]
    unsettled = [
        task for task in tasks if task.outcome == "INCONCLUSIVE" and not task.uninformative
    ]
    lost = [task for task in unsettled if task.too_many_lost]
    if uninformative:
        left = (
            f"; {_inconclusive_reason(unsettled)}"
            if unsettled
            else _other_tasks_text(tasks, "INCONCLUSIVE")
        )
        names = join_limited([task.task for task in uninformative], " and ", MAX_NAMED)
        return f"{names} cannot show a loss: {uninformative[0].uninformative}{left}"
    if lost:
        rest = [task for task in tasks if task not in lost]
        open_ = [task for task in rest if task.outcome == "INCONCLUSIVE"]
        left = (
            f"; {_inconclusive_reason(open_)}"
            if open_
            else _other_tasks_text(tasks, "INCONCLUSIVE")
        )
        names = join_limited([task.task for task in lost], " and ", MAX_NAMED)
        verb = "has" if len(lost) == 1 else "have"
        return f"{names} {verb} too many responses that do not count: {lost[0].lost_answers}{left}"
    if len(unsettled) == 1:
        (task,) = unsettled
        unit = task.scale
        change = f"{unit.signed(task.difference)} {unit.unit}"
        span = f"between {unit.signed(task.low)} and {unit.signed(task.high)}"
        remedy = "at this difference no number of documents would settle it"
        if task.has_too_few_documents:
            remedy = task.remedy
        elif task.documents_needed is not None:
            seeds = f", or {task.seeds_needed:,} seeds," if task.seeds_needed else ""
            remedy = f"{about(task.documents_needed)}{seeds} would settle it"
        read = plural(task.documents, "document")
        return (
            f"{task.task} is not settled after {read}: {change}, {span}, "
            f"{unit.accepted}; {remedy}{_other_tasks_text(tasks, 'INCONCLUSIVE')}"
        )
    named = [f"{task.task} ({_needed_documents(task)})" for task in unsettled]
    names = join_limited(named, ", ", MAX_NAMED)
    return f"{len(unsettled)} of {len(tasks)} tasks are not settled: {names}"


def _needed_documents(task: TaskVerdict) -> str:
    """Return how many documents of a task were read, and how many would settle it."""
    if task.has_too_few_documents:
        return task.remedy
    read = f"{plural(task.documents, 'document')} read"
    needed = task.documents_needed
    if needed is None:
        return f"{read}; at this difference no number of documents would settle it"
    return f"{read}, {about(needed)} needed"


def _change_text(task: TaskVerdict, unit: Scale) -> str:
    """Return `loses 0.43 points (at most 0.84)`, or the corresponding text for a gain."""
    change, bound = _change_and_bound(task, unit)
    return f"{change} ({bound})"


def _change_and_bound(task: TaskVerdict, unit: Scale) -> tuple[str, str]:
    """Return `loses 0.43 points` and `at most 0.84`, or the corresponding texts for a gain."""
    difference = float(unit.number(task.difference))
    if difference < 0:
        change = f"loses {unit.number(-task.difference)} {unit.unit}"
        return change, f"at most {unit.number(-task.low)}"
    if not difference:
        return "loses nothing", f"at most {unit.number(max(0.0, -task.low))} {unit.unit}"
    change = f"gains {unit.number(task.difference)} {unit.unit}"
    if task.low >= 0:
        return change, f"at least {unit.number(task.low)}"
    return change, f"at worst it loses {unit.number(-task.low)}"


def _other_tasks_text(tasks: Sequence[TaskVerdict], outcome: Outcome) -> str:
    """Return a sentence on the other tasks if all of them pass, else ""."""
    others = [task for task in tasks if task.outcome != outcome]
    if not others or {task.outcome for task in others} != {"PASS"}:
        return ""
    return (
        "; the other task passes" if len(others) == 1 else f"; the other {len(others)} tasks pass"
    )
