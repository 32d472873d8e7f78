"""Attach the margin, the acceptable loss, to the pair of each task.

Metrics that are shares have a margin in points. All other metrics have a relative margin: for
example, a perplexity may rise by 1 %, or a BLEU score may fall by 1 %. A difference in nats is the
logarithm of a ratio of perplexities, so a margin of 1 % is log(1.01) nats. For metrics in other
units, a margin of 1 % is a hundredth of the baseline's value.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from vexport.errors import InputError, raise_all
from vexport.evaluation.pairs import TaskPair
from vexport.records.margins import (
    DEFAULT_RELATIVE_MARGIN,
    EVERY_TASK,
    Margin,
    MarginSetting,
    margins_by_task,
)

_NATS = ("nats", "nats per word", "nats per byte")


def with_margins(gates: Sequence[TaskPair], setting: MarginSetting) -> tuple[TaskPair, ...]:
    """Return the deciding pairs with their margins. Their `informational` pairs get the same.

    Raises:
        InputError: If a margin is for an unknown task, if a share has a relative margin, or if
        another metric has a margin in points. The error lists all such margins.
    """
    given = margins_by_task(setting)
    names = [gate.task for gate in gates]
    problems = [*unknown_names("margin", given, names)]
    everywhere = given.get(EVERY_TASK)
    for gate in gates:
        own = given.get(gate.task, everywhere)
        is_share = gate.unit == "share"
        if own is not None and own.is_relative == is_share:
            problems.append(wrong_kind(gate.task, gate.metric, own, is_share=is_share))
    raise_all(problems)
    return tuple(_with_margin(gate, given.get(gate.task) or everywhere) for gate in gates)


def unknown_names(where: str, given: Iterable[str], names: Sequence[str]) -> Iterator[InputError]:
    """Yield an error for each name in `given` that is not the name of a task.

    `names` are the names of the tasks, and of the groups that count as a task.
    """
    for name in given:
        if name not in (*names, EVERY_TASK):
            yield InputError(
                where,
                got=f"no task {name}",
                need=f"one of {', '.join(names)}",
                fix="name one of these; for tasks in a group, name the group",
            )


def wrong_kind(task: str, metric: str, margin: Margin, *, is_share: bool) -> InputError:
    """Build the error for a share with a relative margin, or another metric with points."""
    where = f"margin of task {task}"
    if is_share:
        return InputError(
            where,
            got=f"{margin} for {metric}, which is a share of correct responses",
            need="a margin in points",
            fix=f"use --margin {task}={margin.value:g} for {100 * margin.value:g} points",
        )
    relative = Margin(DEFAULT_RELATIVE_MARGIN, True)
    return InputError(
        where,
        got=f"{margin} for {metric}, which is not a share",
        need="a relative margin",
        fix=f"use --margin {task}={relative} (a loss of {relative} of the baseline's value)",
    )


def _with_margin(gate: TaskPair, given: Margin | None) -> TaskPair:
    """Return a gate and its informational pairs with their margins.

    `given` is the margin for the gate, None for the default.
    """
    also = tuple(_one_with_margin(pair, given) for pair in gate.informational)
    return replace(_one_with_margin(gate, given), informational=also)


def _one_with_margin(pair: TaskPair, given: Margin | None) -> TaskPair:
    if pair.unit == "share":
        is_points = given is not None and not given.is_relative
        return replace(pair, margin=given.value if given and is_points else None)
    share = given.value if given and given.is_relative else DEFAULT_RELATIVE_MARGIN
    margin = math.log1p(share) if pair.unit in _NATS else share * abs(pair.baseline_value)
    return replace(pair, margin=margin, relative_margin=share)
