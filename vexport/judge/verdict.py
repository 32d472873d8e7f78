"""Decide PASS, FAIL or INCONCLUSIVE from two runs of a harness on the same documents.

With several tasks, the verdict is PASS if every task passes. Such an intersection-union test needs
no correction for the number of tasks (Berger, Technometrics 24, 1982). Therefore each lower bound
is at 1 - alpha. If a model loses more than the margin on any task, the probability of PASS is at
most alpha.

The verdict is FAIL if any task fails. Therefore the upper bounds are corrected by Holm's procedure
(Scandinavian Journal of Statistics 6, 1979). A task's upper bound is at the level of the last step
in which the procedure tested the task. The task fails exactly if this bound, which reports show, is
below -margin.

The verdict's reason is a short sentence (reasons.py). Reports show intervals and levels in tables.
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
from vexport.judge.intervals import difference_interval
from vexport.judge.lost import lost_answers_text
from vexport.judge.margin_checks import margin_changes, require_fitting
from vexport.judge.pairs import TaskPair, gated_tasks, pool
from vexport.judge.reasons import reason_for
from vexport.judge.same_response import same_response_warnings
from vexport.judge.task_verdict import compare_task, comparison, margin_amount
from vexport.records import Comparison, Outcome, Prompting, Reason, TaskVerdict, TextLimit, Verdict
from vexport.records.chosen_metric import Choice
from vexport.records.margin import EVERY_TASK, Margins, MarginSetting
from vexport.records.values import join_limited
from vexport.rules import results as result_rules
from vexport.rules import verdict as rules
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
        raise InputError.of(
            result_rules.SEVERAL_HARNESSES, str(candidate), names=[right.harness, left.harness]
        )
    repeated = _repeatability_text(left, "baseline", alpha)
    repeated += _repeatability_text(right, "candidate", alpha)
    raise_all([*gate_contradictions(left.gates, gate, "gate", left.file)])
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
    reason = Reason.of(rules.MISSING_TASKS, missing=lacking, reason=verdict.reason)
    return replace(verdict, outcome="INCONCLUSIVE", rule=reason.rule, reason=reason.text)


def tasks_without_loss(path: Path, folder: Path, alpha: float) -> Iterator[str]:
    """Describe the tasks of an accepted baseline that cannot show a loss of a later candidate.

    `folder` has the results that were accepted.
    """
    accepted, results = read_accepted_table(path), read_lm_eval(folder)
    gates = gated_tasks(accepted, results, NO_CHOICE)
    margins = Margins.read(accepted.margin)
    require_fitting(gates, margins)
    for task in judge(gates, margins=margins, alpha=alpha, prompting=results.prompting).tasks:
        if task.obstacle is not None and task.obstacle.rule != rules.LOST_RESPONSES.id:
            yield f"{task.task} {task.obstacle.text}"


def _direction_warnings(verdict: Verdict) -> Iterator[str]:
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
        lost = lost_answers_text(task.answers) if task.answers is not None else ""
        if lost and lost not in verdict.reason:
            yield f"{task.task}: {lost}"


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
    reason = reason_for(outcome, tasks)
    return Verdict(
        outcome=outcome,
        rule=reason.rule,
        reason=reason.text,
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
