"""PASS, FAIL or INCONCLUSIVE from two lm-eval runs on the same documents.

Several tasks: PASS needs every task to pass, and a test that refuses only when all its parts refuse needs
no correction (intersection-union test, Berger, Technometrics 24, 1982): each lower bound stands at
1 - alpha, and a model that loses more than the margin on any task passes with probability alpha at most.
FAIL needs one task only, so that upper bounds are corrected by Holm's steps (Scandinavian Journal of
Statistics 6, 1979): a task's upper bound stands at the level at which Holm last tested it, hence FAIL holds
exactly where the bound shown is below -margin.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from vexport.errors import InputError, raise_all
from vexport.errors.extras import attempt_all
from vexport.evaluation.accepted import is_accepted, pair_with, read_accepted
from vexport.evaluation.compare import compare_task, comparison, difference_interval
from vexport.evaluation.fingerprint import EMULATED, ENDPOINT, MODEL, REVISION, changes, device_of
from vexport.evaluation.pairs import Choice, GatedTask, TaskPair, gated_tasks, pool
from vexport.evaluation.reason import reason_for
from vexport.evaluation.results import Results, read_repeated, read_results, require_deterministic
from vexport.records import Comparison, Outcome, Prompting, TaskVerdict, TextLimit, Verdict

NO_CHOICE: Choice = MappingProxyType({})


def decide(
    baseline: Path,
    candidate: Path,
    *,
    margin: float,
    alpha: float,
    gate: Choice = NO_CHOICE,
) -> Verdict:
    """Compare two lm-eval output folders, wherever they were made, or one with an accepted baseline.

    `margin` is the acceptable loss in the metric's own units (0.02 is 2 points of accuracy), `alpha` the
    probability of a wrong PASS, and of a wrong FAIL, `gate` the metric that decides for a task (pairs.py).
    InputError where the runs cannot be compared, EnvironmentFault where the engine proved not deterministic.
    """
    _check_limits(margin, alpha)
    if is_accepted(baseline):
        right = read_results(candidate)
        repeated = _asked_again(right, alpha)
        if gate:
            got, need = "another choice of gates", "those that were accepted"
            raise InputError("gate", got=got, need=need, fix="leave it out, or accept it again")
        accepted = read_accepted(baseline)
        where, circumstances = ("when the baseline was accepted", "now"), accepted.fingerprint
        gated = pair_with(accepted, right)
    else:
        left, right = attempt_all((str(run), partial(read_results, run)) for run in (baseline, candidate))
        repeated = "".join(_asked_again(run, alpha) for run in (left, right))
        own = (MODEL, ENDPOINT, REVISION, EMULATED)
        where = ("in the baseline", "in the results")
        circumstances = {name: value for name, value in left.fingerprint.items() if name not in own}
        gated = gated_tasks(left, right, gate)
    warnings = changes(circumstances, right.fingerprint, where=where)
    verdict = judge(gated, margin=margin, alpha=alpha, prompting=right.prompting)
    return replace(
        verdict,
        method=verdict.method + repeated,
        warnings=(*warnings, *((right.warning,) if right.warning else ())),
        prompting=right.prompting,
        device=device_of(right.fingerprint),
    )


def _asked_again(run: Results, alpha: float) -> str:
    """The changes of a model against itself; EnvironmentFault where the engine is non-deterministic."""
    folder = run.file.parent
    repeated = read_repeated(folder)
    if repeated is None:
        return ""
    require_deterministic(folder, repeated, alpha)
    return f"; asked again, {repeated.changed} of {repeated.documents} answers changed"


def judge(
    gated: Sequence[GatedTask],
    *,
    margin: float,
    alpha: float,
    prompting: Prompting | None = None,
) -> Verdict:
    """The answer over all tasks; `prompting` tells how they were asked."""
    gates = [task.gate for task in gated]
    levels = holm_levels(gates, margin=margin, alpha=alpha)
    tasks = tuple(
        compare_task(
            task.gate,
            margin=margin,
            alpha=alpha,
            fail_alpha=level,
            also=task.also,
            is_templated=_is_templated(task.gate.task, prompting),
        )
        for task, level in zip(gated, levels, strict=True)
    )
    outcome = overall_outcome(tasks)
    return Verdict(
        outcome=outcome,
        reason=reason_for(outcome, tasks, margin=margin),
        margin=margin,
        alpha=alpha,
        method=_method(gates, alpha),
        tasks=tasks,
        pooled=_pooled(gates, margin, alpha),
    )


def _is_templated(task: str, prompting: Prompting | None) -> bool | None:
    return None if prompting is None else bool(prompting.chat_template) and task not in prompting.untemplated


def holm_levels(pairs: Sequence[TaskPair], *, margin: float, alpha: float) -> list[float]:
    """The level at which Holm's procedure last tests each task for a loss beyond `margin`.

    Each step tests the tasks that are still open at alpha / (number of them) and closes those that fail.
    """
    levels = [alpha] * len(pairs)
    remaining = list(range(len(pairs)))
    while remaining:
        level = alpha / len(remaining)
        for index in remaining:
            levels[index] = level
        failed = [index for index in remaining if difference_interval(pairs[index], level).high < -margin]
        if not failed:
            break
        remaining = [index for index in remaining if index not in failed]
    return levels


def overall_outcome(tasks: Sequence[TaskVerdict | TextLimit]) -> Outcome:
    """FAIL if any task, or measure of text, fails, PASS if all pass, else INCONCLUSIVE."""
    outcomes = {task.outcome for task in tasks}
    if "FAIL" in outcomes:
        return "FAIL"
    return "PASS" if outcomes == {"PASS"} else "INCONCLUSIVE"


def _check_limits(margin: float, alpha: float) -> None:
    problems = []
    if not 0 <= margin < 1:
        fix = "use 0.02 to accept a loss of 2 points"
        problems.append(InputError("margin", got=str(margin), need="a number from 0 to below 1", fix=fix))
    if not 0 < alpha < 0.5:
        problems.append(InputError("alpha", got=str(alpha), need="between 0 and 0.5", fix="use 0.05"))
    raise_all(problems)


def _method(gates: Sequence[TaskPair], alpha: float) -> str:
    intervals = " and ".join(dict.fromkeys(map(_interval_name, gates)))
    method = f"paired difference, {intervals}, one-sided {100 * (1 - alpha):.4g}% bounds"
    if len(gates) == 1:
        return method
    return f"{method}; every task must pass, upper bounds corrected for {len(gates)} tasks (Holm)"


def _interval_name(gate: TaskPair) -> str:
    name = "Tango's score interval" if gate.binary else "BCa bootstrap"
    if gate.clusters is None:
        return name
    return f"{name} clustered by {'document' if gate.seeds > 1 else 'task'}"


def _pooled(gates: Sequence[TaskPair], margin: float, alpha: float) -> Comparison | None:
    """All documents as one task, where every metric is 0/1: informative, since the tasks decide."""
    pairs = [gate for gate in gates if gate.binary and gate.sign > 0]
    if len(pairs) < len(gates) or len(pairs) == 1:
        return None
    shared = {(pair.metric, pair.filter) for pair in pairs}
    pooled = comparison(pool("all tasks", pairs), margin=margin, alpha=alpha)
    return pooled if len(shared) == 1 else replace(pooled, metric="share of right answers", filter="none")
