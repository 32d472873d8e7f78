"""How to read the numbers of a verdict: what an interval spans, at which level, and what p values are for."""

from vexport.reports.formatting import p_value
from vexport.reports.sentences import accepted_loss, method_line
from vexport.types import Verdict


def reading_lines(verdict: Verdict) -> tuple[str, ...]:
    """A sentence for each kind of number, the method last."""
    loss = accepted_loss(verdict)
    level = _level(verdict.alpha)
    lines = [
        f"Difference: quantized minus baseline on the same documents. A loss of {loss} is accepted.",
        f"Interval of a difference: from a {level} lower to a {level} upper bound, each one-sided. All of it "
        "above the accepted loss is PASS, all of it below is FAIL, else INCONCLUSIVE.",
        *_levels_line(verdict),
        f"Interval of a score, of recovery (quantized / baseline) and of flips: {_level(2 * verdict.alpha)}, "
        "two-sided.",
    ]
    if any(task.mcnemar_p is not None for task in verdict.tasks):
        lines.append(
            "p (McNemar; a permutation test where answers are not right or wrong): whether the two models "
            "differ at all. It decides nothing: a small p next to PASS is a real loss that is smaller than "
            "what was accepted."
        )
    return (*lines, f"Method: {method_line(verdict)}.")


def levels_line(verdict: Verdict) -> str:
    """The levels of the bounds of a difference, in a few words."""
    level, tasks = _level(verdict.alpha), len(verdict.tasks)
    corrected = f", the upper ones corrected for {tasks} tasks (Holm)" if tasks > 1 else ""
    return f"intervals of differences: one-sided {level} bounds{corrected}"


def p_values_line(verdict: Verdict) -> str:
    """`addition 0.031, facts 1.000`; empty where no documents were paired."""
    known = [(task.task, task.mcnemar_p) for task in verdict.tasks if task.mcnemar_p is not None]
    return ", ".join(f"{title} {p_value(value)}" for title, value in known)


def _levels_line(verdict: Verdict) -> tuple[str, ...]:
    """What Holm's correction does to the level of one upper bound (evaluation/verdict.py, holm_levels)."""
    tasks = len(verdict.tasks)
    if tasks < 2:
        return ()
    failed = sum(task.outcome == "FAIL" for task in verdict.tasks)
    levels = dict.fromkeys(_level(verdict.alpha / part) for part in (tasks, max(1, tasks - failed)))
    return (
        f"Several tasks: each of the {tasks} must pass, so lower bounds need no correction. One is enough to "
        f"fail, so upper bounds are corrected for {tasks} tasks (Holm): one alone stands at "
        f"{' to '.join(levels)}, all together at {_level(verdict.alpha)}.",
    )


def _level(alpha: float) -> str:
    """The confidence of a bound: 0.0125 is `98.75%`."""
    return f"{100 * (1 - alpha):.4g}%"
