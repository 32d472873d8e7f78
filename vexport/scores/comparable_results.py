"""Check, before a model runs, that existing results can be compared with its results."""

import math
from collections.abc import Sequence
from pathlib import Path

from vexport.errors import InputError, raise_all
from vexport.rules import results as rules
from vexport.scores.reading import LM_EVAL, read_baseline
from vexport.scores.table import ScoreTable, TaskTable


def read_comparable(path: Path) -> ScoreTable:
    """Read lm-eval's results or an accepted baseline, which the user gave instead of a model.

    Raises:
        InputError: If the results are missing or broken, or if another harness wrote them.
    """
    given = read_baseline(path)
    if given.harness != LM_EVAL:
        raise InputError.of(rules.OTHER_HARNESS, str(path), harness=given.harness)
    return given


def require_comparable_results(
    given: ScoreTable, names: Sequence[str], exact: Sequence[str], limit: float | None
) -> None:
    """Raise InputError if the given results cannot be compared with results of the tasks `names`.

    `exact` are the names from YAML files. These names are certainly tasks. Other names that are
    missing in the results may be tags. lm-eval replaces a tag by its tasks. If a name is missing,
    only the numbers of documents of the known tasks are compared.
    """
    known = {name: given.members.get(name, (name,)) for name in names}
    missing = [name for name, members in known.items() if not set(members) <= given.tasks.keys()]
    requested = {
        member for name, members in known.items() if name not in missing for member in members
    }
    where, tasks = str(given.file), ",".join(given.tasks)
    problems = [
        InputError.of(rules.MISSING_TASK, where, task=name, tasks=tasks)
        for name in missing
        if name in exact
    ]
    if not missing:
        problems += [
            InputError.of(rules.FURTHER_TASK, where, task=name, tasks=tasks)
            for name in given.tasks
            if name not in requested
        ]
    for name in sorted(requested):
        count, expected = given.tasks[name].documents, _expected(given.tasks[name], limit)
        if count != expected:
            place = f"{given.file}: task {name}"
            problems.append(
                InputError.of(rules.OTHER_DOCUMENTS, place, count=count, expected=expected)
            )
    raise_all(problems)


def _expected(task: TaskTable, limit: float | None) -> int:
    """Return the number of documents that lm-eval will use, as far as it is known."""
    size = task.documents if task.full_size is None else task.full_size
    if limit is None:
        return size
    if limit >= 1:
        return min(size, int(limit))
    return task.documents if task.full_size is None else min(size, math.ceil(size * limit))
