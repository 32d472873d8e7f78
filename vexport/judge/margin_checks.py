"""Check that margins fit the tasks, and compare them with an accepted baseline's margins."""

from collections.abc import Iterable, Iterator, Sequence

from vexport.errors import InputError, raise_all
from vexport.judge.pairs import TaskPair
from vexport.records.margin import DEFAULT_RELATIVE_MARGIN, EVERY_TASK, Margin, Margins
from vexport.records.values import join_limited

_MAX_NAMED = 3


def require_fitting(gates: Sequence[TaskPair], margins: Margins) -> None:
    """Raise InputError unless the margins fit the deciding pairs.

    The error lists all margins of unknown tasks, relative margins of shares, and margins in points
    of other metrics.
    """
    problems = [*unknown_names("margin", margins.by_task, [gate.task for gate in gates])]
    for gate in gates:
        is_share = gate.unit == "share"
        problems += wrong_kind(gate.task, gate.metric, margins.given(gate.task), is_share=is_share)
    raise_all(problems)


def margin_changes(gates: Sequence[TaskPair], given: Margins, accepted: Margins) -> Iterator[str]:
    """Yield a text for each given margin that differs from the accepted baseline's margin."""
    tasks: dict[tuple[Margin, Margin], list[str]] = {}
    for gate in gates:
        new, old = given.of(gate.task, gate.unit), accepted.of(gate.task, gate.unit)
        if new != old:
            tasks.setdefault((new, old), []).append(gate.task)
    for (new, old), names in tasks.items():
        yield (
            f"{join_limited(names, ' and ', _MAX_NAMED)}: margin {new}, and the baseline was "
            f"accepted with {old}"
        )


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


def wrong_kind(
    task: str, metric: str, margin: Margin | None, *, is_share: bool
) -> Iterator[InputError]:
    """Yield an error if a share has a relative margin, or another metric has points."""
    if margin is None or margin.fits(is_share=is_share):
        return
    where = f"margin of task {task}"
    if is_share:
        yield InputError(
            where,
            got=f"{margin} for {metric}, which is a share of correct responses",
            need="a margin in points",
            fix=f"use --margin {task}={margin.value:g} for {100 * margin.value:g} points",
        )
        return
    relative = Margin(DEFAULT_RELATIVE_MARGIN, True)
    yield InputError(
        where,
        got=f"{margin} for {metric}, which is not a share",
        need="a relative margin",
        fix=f"use --margin {task}={relative} (a loss of {relative} of the baseline's value)",
    )
