"""Attach the margin, the acceptable loss, to the pair of each task.

Metrics that are shares have a margin in points. All other metrics have a relative margin: for
example, a perplexity may rise by 1 %, or a BLEU score may fall by 1 %. A difference in nats is the
logarithm of a ratio of perplexities, so a margin of 1 % is log(1.01) nats. For metrics in other
units, a margin of 1 % is a hundredth of the baseline's value.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from vexport.errors import InputError, raise_all
from vexport.judge.pairs import TaskPair
from vexport.records.margins import (
    DEFAULT_MARGIN,
    DEFAULT_RELATIVE_MARGIN,
    EVERY_TASK,
    Margin,
    MarginSetting,
    MarginValue,
    margins_by_task,
)
from vexport.records.values import join_limited

_MAX_NAMED = 3
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


def margin_changes(
    gates: Sequence[TaskPair], given: MarginSetting, accepted: MarginSetting
) -> tuple[str, ...]:
    """Describe each given margin that differs from the margin of the accepted baseline.

    Raises:
        InputError: If the given margins or the accepted margins do not fit the tasks.
    """
    if given is None or accepted is None:
        return ()
    tasks: dict[tuple[Margin, Margin], list[str]] = {}
    pairs = zip(with_margins(gates, given), with_margins(gates, accepted), strict=True)
    for new, old in pairs:
        margins = margin_of_pair(new), margin_of_pair(old)
        if margins[0] != margins[1]:
            tasks.setdefault(margins, []).append(new.task)
    return tuple(
        f"{join_limited(names, ' and ', _MAX_NAMED)}: margin {new}, and the baseline was accepted "
        f"with {old}"
        for (new, old), names in tasks.items()
    )


def margins_of(gates: Sequence[TaskPair], setting: MarginSetting) -> MarginSetting:
    """Return the margins of a setting without the tasks that are not judged."""
    if not isinstance(setting, Mapping):
        return setting
    names = {EVERY_TASK, *(gate.task for gate in gates)}
    return {name: margin for name, margin in setting.items() if name in names}


def margins_to_store(gates: Sequence[TaskPair]) -> MarginValue | dict[str, MarginValue]:
    """Return the margins of the deciding pairs: one value if all tasks have the same margin."""
    margins = {gate.task: margin_of_pair(gate).setting for gate in gates}
    values = [*dict.fromkeys(margins.values())]
    return values[0] if len(values) == 1 else margins


def margin_of_pair(pair: TaskPair) -> Margin:
    """Return the margin that applies to a pair."""
    if pair.relative_margin is not None:
        return Margin(pair.relative_margin, True)
    return Margin(DEFAULT_MARGIN if pair.margin is None else pair.margin)


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
