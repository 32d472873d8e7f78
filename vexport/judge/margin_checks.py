"""Check that margins fit the tasks, and compare them with an accepted baseline's margins."""

from collections.abc import Iterator, Sequence

from vexport.errors import InputError, raise_all
from vexport.judge.pairs import TaskPair, unknown_names
from vexport.records.margin import DEFAULT_RELATIVE_MARGIN, Margin, Margins
from vexport.records.values import join_limited
from vexport.rules import margin as rules

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


def wrong_kind(
    task: str, metric: str, margin: Margin | None, *, is_share: bool
) -> Iterator[InputError]:
    """Yield an error if a share has a relative margin, or another metric has points."""
    if margin is None or margin.fits(is_share=is_share):
        return
    relative = str(Margin(DEFAULT_RELATIVE_MARGIN, True))
    yield InputError.of(
        rules.KIND,
        f"margin of task {task}",
        margin=margin,
        metric=metric,
        task=task,
        fitting=f"{margin.value:g}" if is_share else relative,
    )
