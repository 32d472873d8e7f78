"""Find the tasks that both sides of a verdict have."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from vexport.errors import InputError, nearest_hint, raise_all
from vexport.records.values import join_limited
from vexport.scores.settings import MAX_NAMED


@dataclass(frozen=True, slots=True)
class SharedTasks:
    """The tasks that both sides have, and a clause for each side that lacks tasks."""

    names: tuple[str, ...]
    missing: tuple[str, ...]


def shared_tasks(
    baseline: Collection[str],
    candidate: Collection[str],
    files: tuple[Path, Path],
    selected: Sequence[str],
    selectable: Collection[str],
) -> SharedTasks:
    """Return the tasks that both sides have.

    `files` are the two sides' files. `selected` are the tasks and groups that the user named. The
    two sides have only tasks that are selected. `selectable` are all tasks and groups of either
    side.

    Raises:
        InputError: If neither side has a selected task or group, or if the sides have no task in
        common.
    """
    raise_all(
        [
            InputError(
                "--task",
                got=f"no task {name} on either side",
                need=f"names of tasks or groups{nearest_hint(name, selectable)}",
                fix=f"choose from {join_limited([*dict.fromkeys(selectable)], ', ', MAX_NAMED)}",
            )
            for name in dict.fromkeys(selected)
            if name not in selectable
        ]
    )
    known = (set(baseline), set(candidate))
    names = tuple(name for name in baseline if name in known[1])
    lacking = (
        ("the results", [name for name in baseline if name not in known[1]]),
        ("the baseline", [name for name in candidate if name not in known[0]]),
    )
    missing = tuple(
        f"{side} {'have' if side == 'the results' else 'has'} no task "
        f"{join_limited(tasks, ', ', MAX_NAMED)}"
        for side, tasks in lacking
        if tasks
    )
    if not names:
        fix = "evaluate the same tasks" if not selected else "name tasks of both sides"
        raise InputError(
            "--task" if selected else str(files[1]),
            got=" and ".join(missing) or f"no documents of {', '.join(selected)} on either side",
            need=f"at least one task that {files[0]} has, too",
            fix=fix,
        )
    return SharedTasks(names, missing)
