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
from pathlib import Path
from types import MappingProxyType

from vexport.errors import InputError, raise_all
from vexport.evaluation.accepted import Accepted, is_accepted, pair_with, read_accepted
from vexport.evaluation.compare import compare_task, comparison, difference_interval
from vexport.evaluation.fingerprint import EMULATED, MODEL, TASK_HASH, Fingerprint, changes
from vexport.evaluation.gates import Choice, Compared, GatedTask, gated_tasks
from vexport.evaluation.pairs import TaskPair, pool
from vexport.evaluation.repeat import read_repeated, require_deterministic
from vexport.evaluation.results import Results, read_results
from vexport.evaluation.statistics import Interval
from vexport.evaluation.stopping import read_looks
from vexport.evaluation.unpaired import USUAL_DISAGREEMENT, UnpairedTask
from vexport.types import Comparison, Look, Outcome, TaskVerdict, Verdict

NO_CHOICE: Choice = MappingProxyType({})
MAX_SENTENCES = 3
"""Tasks spelled out in the reason; the others are counted."""


def decide(
    baseline: Path,
    candidate: Path,
    *,
    margin: float,
    alpha: float,
    gate: Choice = NO_CHOICE,
    early: bool = False,
) -> Verdict:
    """Compare two lm-eval output folders, wherever they were made, or one with an accepted baseline.

    `margin` is the acceptable loss in the metric's own units (0.02 is 2 points of accuracy), `alpha` the
    probability of a wrong PASS, and of a wrong FAIL, `gate` the metric that decides for a task (gates.py);
    with `early`, the candidate's evaluation stopped when it was decided, and bounds are those of bets.
    InputError where the runs cannot be compared, EnvironmentFault where the engine proved not deterministic.
    """
    _check_limits(margin, alpha)
    right = read_results(candidate)
    if is_accepted(baseline):
        repeated = _asked_again(right, alpha)
        verdict = _decide_against(read_accepted(baseline), right, margin, alpha, gate, early)
        return replace(verdict, method=verdict.method + repeated, looks=_looks(right, early))
    left = read_results(baseline)
    repeated = "".join(_asked_again(run, alpha) for run in (left, right))
    where = ("in the baseline", "in the results")
    others = {name: value for name, value in left.fingerprint.items() if name not in (MODEL, EMULATED)}
    changed = _circumstances(others, right.fingerprint, where, early)
    gated = gated_tasks(left, right, gate, early=early)
    verdict = judge(gated, margin=margin, alpha=alpha, warnings=changed)
    return replace(verdict, method=verdict.method + repeated, looks=_looks(right, early))


def _looks(candidate: Results, early: bool) -> tuple[Look, ...]:
    return read_looks(candidate.file.parent) if early else ()


def _asked_again(run: Results, alpha: float) -> str:
    """How a model did against itself; EnvironmentFault where that tells of an engine that wavers."""
    folder = run.file.parent
    repeated = read_repeated(folder)
    if repeated is None:
        return ""
    require_deterministic(folder, repeated, alpha)
    return f"; asked again, {repeated.changed} of {repeated.documents} answers changed"


def _circumstances(
    old: Fingerprint, new: Fingerprint, where: tuple[str, str], early: bool
) -> tuple[str, ...]:
    """What changed; lm-eval's task hash is of the documents read, which an early end makes fewer."""
    told = {name: value for name, value in old.items() if not (early and name.startswith(TASK_HASH))}
    return changes(told, new, where=where)


def _decide_against(
    accepted: Accepted, candidate: Results, margin: float, alpha: float, gate: Choice, early: bool
) -> Verdict:
    if gate:
        got, need = "another choice of gates", "those that were accepted"
        raise InputError("gate", got=got, need=need, fix="leave it out, or accept anew")
    where = ("when the baseline was accepted", "now")
    changed = _circumstances(accepted.fingerprint, candidate.fingerprint, where, early)
    return judge(pair_with(accepted, candidate, early=early), margin=margin, alpha=alpha, warnings=changed)


def judge(
    gated: Sequence[GatedTask], *, margin: float, alpha: float, warnings: Sequence[str] = ()
) -> Verdict:
    """The answer over all tasks."""
    gates = [task.gate for task in gated]
    levels = holm_levels(gates, margin=margin, alpha=alpha)
    tasks = tuple(
        compare_task(task.gate, margin=margin, alpha=alpha, fail_alpha=level, also=task.also)
        for task, level in zip(gated, levels, strict=True)
    )
    outcome = overall_outcome(tasks)
    pooled = _pooled(gates, margin, alpha)
    return Verdict(
        outcome=outcome,
        reason="; ".join(_reasons(outcome, tasks, levels, margin, alpha) + _pooled_sentence(pooled, alpha)),
        margin=margin,
        alpha=alpha,
        method=_method(gates, alpha),
        tasks=tasks,
        pooled=pooled,
        warnings=(
            *map(_unpaired_warning, (one for one in gates if isinstance(one, UnpairedTask))),
            *warnings,
        ),
    )


def holm_levels(pairs: Sequence[Compared], *, margin: float, alpha: float) -> list[float]:
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


def overall_outcome(tasks: Sequence[TaskVerdict]) -> Outcome:
    """FAIL if any task fails, PASS if all pass, else INCONCLUSIVE."""
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


def _method(gates: Sequence[Compared], alpha: float) -> str:
    intervals = dict.fromkeys(map(_interval_name, gates))
    kinds = "paired" if any(isinstance(one, TaskPair) for one in gates) else "unpaired"
    several = "; every task must pass, FAIL corrected over tasks by Holm" if len(gates) > 1 else ""
    return f"{kinds} difference, {' and '.join(intervals)}, one-sided {_percent(1 - alpha)} bounds{several}"


def _interval_name(one: Compared) -> str:
    if isinstance(one, UnpairedTask):
        return f"unpaired {'Newcombe' if one.binary else 'normal'} interval"
    if one.early:
        return "bets that may stop at any document"
    name = "Tango's score interval" if one.binary else "BCa bootstrap"
    return name if one.clusters is None else f"{name} clustered by task"


def _unpaired_warning(one: UnpairedTask) -> str:
    """What missing samples cost."""
    start = f"{one.task}: no samples to pair, so that the means are compared as if of different documents"
    if one.cost is None or one.cost <= 1:
        return f"{start}; log samples (--log_samples) to need fewer documents"
    return (
        f"{start}, which needs {one.cost:.1f} times the documents that pairs need where "
        f"{_percent(USUAL_DISAGREEMENT)} of the answers change; log samples (--log_samples)"
    )


def _reasons(
    outcome: Outcome, tasks: Sequence[TaskVerdict], levels: Sequence[float], margin: float, alpha: float
) -> list[str]:
    """A sentence for each task that has the overall outcome."""
    decisive = [
        _sentence(task, margin, 1 - alpha - level)
        for task, level in zip(tasks, levels, strict=True)
        if task.outcome == outcome
    ]
    more = len(decisive) - MAX_SENTENCES
    rest = [f"the same holds for {more} more of {len(tasks)} tasks"] if more > 0 else []
    return decisive[:MAX_SENTENCES] + rest


def _pooled(gates: Sequence[Compared], margin: float, alpha: float) -> Comparison | None:
    """All documents as one task, where every metric is 0/1: informative, since the tasks decide."""
    pairs = [one for one in gates if isinstance(one, TaskPair) and one.binary and one.sign > 0]
    if len(pairs) < len(gates) or len(pairs) == 1:
        return None
    shared = {(pair.metric, pair.filter) for pair in pairs}
    found = comparison(pool("all tasks", pairs), margin=margin, alpha=alpha)
    return found if len(shared) == 1 else replace(found, metric="share of right answers", filter="none")


def _pooled_sentence(pooled: Comparison | None, alpha: float) -> list[str]:
    if pooled is None:
        return []
    change = _change(pooled.difference, Interval(pooled.low, pooled.high), 1 - 2 * alpha, 100)
    return [f"over all {pooled.documents} documents the share of right answers saw {change}"]


def _sentence(task: TaskVerdict, margin: float, confidence: float) -> str:
    scale = 100 if max(task.baseline.value, task.candidate.value) <= 1 else 1
    unit = " points" if scale == 100 else ""
    start = (
        f"{task.task}: {task.baseline.value:.3f} -> {task.candidate.value:.3f}, "
        f"{_change(task.difference, Interval(task.low, task.high), confidence, scale)}"
    )
    limit = f"the margin of {scale * margin:g}{unit}"
    if task.outcome == "PASS":
        return f"{start} stays within {limit}"
    if task.outcome == "FAIL":
        return f"{start} is a loss beyond {limit}"
    needed = task.documents_needed
    remedy = (
        f"about {needed} documents would" if needed else "at this difference no number of documents would"
    )
    return f"{start} on {task.documents} documents does not settle whether it stays within {limit}; {remedy}"


def _change(difference: float, interval: Interval, confidence: float, scale: int) -> str:
    value, low, high = (f"{round(scale * x, 2) + 0.0:+.2f}" for x in (difference, *interval))
    unit = " points" if scale == 100 else ""
    return f"a change of {value}{unit} ({_percent(confidence)} interval {low} to {high})"


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
