"""Find the tasks that both sides of a verdict have."""

from collections.abc import Sequence
from pathlib import Path

from vexport.errors import InputError, nearest_hint, raise_all
from vexport.records.values import join_limited
from vexport.rules import results as rules
from vexport.scores.settings import MAX_NAMED
from vexport.scores.table import ScoreTable


def shared_tasks(
    baseline: ScoreTable,
    candidate: ScoreTable,
    paths: tuple[Path, Path],
    selected: Sequence[str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tasks that both sides have, and a clause for each side that lacks tasks.

    `paths` are the paths of the two sides. `selected` are the tasks and groups that the user named.
    The two sides have only tasks that are selected.

    Raises:
        InputError: If neither side has a selected task or group, or if the sides have no task in
        common.
    """
    selectable = (*baseline.names, *candidate.names)
    raise_all(
        [
            InputError.of(
                rules.UNKNOWN_TASK,
                "--task",
                task=name,
                hint=nearest_hint(name, selectable),
                known=join_limited([*dict.fromkeys(selectable)], ", ", MAX_NAMED),
            )
            for name in dict.fromkeys(selected)
            if name not in selectable
        ]
    )
    names = tuple(name for name in baseline.tasks if name in candidate.tasks)
    lacking = (
        ("the results", [name for name in baseline.tasks if name not in candidate.tasks]),
        ("the baseline", [name for name in candidate.tasks if name not in baseline.tasks]),
    )
    missing = tuple(
        f"{side} {'have' if side == 'the results' else 'has'} no task "
        f"{join_limited(tasks, ', ', MAX_NAMED)}"
        for side, tasks in lacking
        if tasks
    )
    if not names:
        raise InputError.of(
            rules.NO_SHARED_TASK,
            "--task" if selected else str(paths[1]),
            missing=" and ".join(missing) or f"no documents of {', '.join(selected)}",
            other=paths[0],
        )
    return names, missing
