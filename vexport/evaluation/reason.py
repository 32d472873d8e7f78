"""The sentence that justifies a verdict, short enough to be read in one breath.

Scores are compared in points; a metric that is no share is compared in its own units, under its own name.
Intervals, levels and p values stand in the tables of a report.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vexport.records import Outcome, TaskVerdict
from vexport.records.values import about

MAX_NAMED = 3
"""Tasks that are named where several are not settled; the others are counted."""
_MOST_DIGITS = 5


@dataclass(frozen=True, slots=True)
class _Unit:
    """Differences of one metric as numbers: points of a share, or the metric's own units."""

    factor: int
    name: str
    margin: float

    def number(self, value: float) -> str:
        """Two decimals, one from 10 up; more where the number would read like the margin and is not it."""
        scaled, limit = self.factor * value, self.factor * self.margin
        for digits in range(1 if abs(scaled) >= 10 else 2, _MOST_DIGITS):
            text = f"{scaled:.{digits}f}"
            if abs(scaled) == limit or abs(float(text)) != limit:
                break
        return text if float(text) else text.lstrip("-")

    def signed(self, value: float) -> str:
        text = self.number(value)
        return text if text.startswith("-") or not float(text) else f"+{text}"

    @property
    def limit(self) -> str:
        """The accepted loss: `2 points`."""
        amount = f"{self.factor * self.margin:.6g}"
        return amount + (" point" if (amount, self.name) == ("1", " points") else self.name)

    @property
    def accepted(self) -> str:
        """`2 points were accepted`."""
        if not self.margin:
            return "no loss was accepted"
        return f"{self.limit} {'were' if self.limit.endswith(' points') else 'was'} accepted"


def reason_for(outcome: Outcome, tasks: Sequence[TaskVerdict], *, margin: float) -> str:
    """The reason of the outcome over all tasks, without a full stop."""
    if outcome == "PASS":
        return _passed(tasks, margin)
    return _failed(tasks, margin) if outcome == "FAIL" else _not_settled(tasks, margin)


def _unit(task: TaskVerdict, margin: float) -> _Unit:
    is_share = max(task.baseline.value, task.candidate.value) <= 1
    return _Unit(100 if is_share else 1, " points" if is_share else f" in {task.metric}", margin)


def _passed(tasks: Sequence[TaskVerdict], margin: float) -> str:
    worst = min(tasks, key=lambda task: task.low)
    unit = _unit(worst, margin)
    if len(tasks) == 1:
        return f"{worst.task} {_moved(worst, unit)}, {unit.accepted}"
    limits = dict.fromkeys(_unit(task, margin).limit for task in tasks)
    loss = f"lose less than {' or '.join(limits)}" if margin else "lose nothing"
    numbers = f"{unit.signed(worst.difference)}, at worst {unit.signed(worst.low)}"
    return f"{_all(tasks)} {loss} (worst: {worst.task} {numbers})"


def _all(tasks: Sequence[TaskVerdict]) -> str:
    return "both tasks" if len(tasks) == 2 else f"all {len(tasks)} tasks"


def _failed(tasks: Sequence[TaskVerdict], margin: float) -> str:
    failed = [task for task in tasks if task.outcome == "FAIL"]
    worst = min(failed, key=lambda task: task.high)
    unit = _unit(worst, margin)
    if len(failed) == 1:
        loss = f"{unit.number(-worst.difference)}{unit.name} (at least {unit.number(-worst.high)})"
        return f"{worst.task} loses {loss}, {unit.accepted}{_others(tasks, 'FAIL')}"
    lost = f"more than {unit.limit}" if margin else "something"
    numbers = f"{unit.signed(worst.difference)}, at best {unit.signed(worst.high)}"
    which = _all(tasks) if len(failed) == len(tasks) else f"{len(failed)} of {len(tasks)} tasks"
    return f"{which} lose {lost} (worst: {worst.task} {numbers})"


def _not_settled(tasks: Sequence[TaskVerdict], margin: float) -> str:
    silent = [task for task in tasks if task.uninformative]
    unsettled = [task for task in tasks if task.outcome == "INCONCLUSIVE" and not task.uninformative]
    if silent:
        verb = "shows" if len(silent) == 1 else "show"
        left = f"; {_not_settled(unsettled, margin)}" if unsettled else _others(tasks, "INCONCLUSIVE")
        names = _first([task.task for task in silent], " and ")
        return f"{names} {verb} nothing: {silent[0].uninformative}{left}"
    if len(unsettled) == 1:
        (task,) = unsettled
        unit = _unit(task, margin)
        change = f"{unit.signed(task.difference)}{unit.name}"
        span = f"between {unit.signed(task.low)} and {unit.signed(task.high)}"
        remedy = "at this difference no number of documents would settle it"
        if task.documents_needed is not None:
            seeds = f", or {task.seeds_needed:,} seeds," if task.seeds_needed else ""
            remedy = f"{about(task.documents_needed)}{seeds} would settle it"
        return (
            f"{task.task} is not settled after {_documents(task)}: {change}, {span}, "
            f"{unit.accepted}; {remedy}{_others(tasks, 'INCONCLUSIVE')}"
        )
    needed = [task.documents_needed for task in unsettled]
    words = [f"{about(number)} needed" if number else "no number would settle it" for number in needed]
    named = [
        f"{task.task} (read {_documents(task)}, {need})" for task, need in zip(unsettled, words, strict=True)
    ]
    return f"{len(unsettled)} of {len(tasks)} tasks are not settled: {_first(named, ', ')}"


def _first(names: Sequence[str], between: str) -> str:
    more = len(names) - MAX_NAMED
    return between.join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _documents(task: TaskVerdict) -> str:
    return f"{task.documents:,} document" if task.documents == 1 else f"{task.documents:,} documents"


def _moved(task: TaskVerdict, unit: _Unit) -> str:
    """`loses 0.43 points (at most 0.84)`, or what it gains."""
    change = float(unit.number(task.difference))
    if change < 0:
        return f"loses {unit.number(-task.difference)}{unit.name} (at most {unit.number(-task.low)})"
    if not change:
        return f"loses nothing (at most {unit.number(max(0.0, -task.low))}{unit.name})"
    gain = f"gains {unit.number(task.difference)}{unit.name}"
    if task.low >= 0:
        return f"{gain} (at least {unit.number(task.low)})"
    return f"{gain} (at worst it loses {unit.number(-task.low)})"


def _others(tasks: Sequence[TaskVerdict], outcome: Outcome) -> str:
    """What the other tasks do, where all of them pass."""
    others = [task for task in tasks if task.outcome != outcome]
    if not others or {task.outcome for task in others} != {"PASS"}:
        return ""
    return "; the other task passes" if len(others) == 1 else f"; the other {len(others)} tasks pass"
