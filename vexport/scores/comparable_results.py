"""Check, before a model runs, that existing results can be compared with its results."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from vexport.errors import InputError, raise_all
from vexport.scores.reading import LM_EVAL, read_baseline
from vexport.scores.table import ScoreTable


def read_comparable(path: Path) -> ScoreTable:
    """Read lm-eval's results or an accepted baseline, which the user gave instead of a model.

    Raises:
        InputError: If the results are missing or broken, or if another harness wrote them.
    """
    given = read_baseline(path)
    if given.harness != LM_EVAL:
        raise InputError(
            str(path),
            got=f"results of {given.harness}",
            need="lm-eval's results, because vexport also evaluates with lm-eval",
            fix="compare results of two models with `vexport verdict`",
        )
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
    fix = f"evaluate the tasks of these results: --task {','.join(given.tasks)}"
    where, need = str(given.file), "the same tasks on both sides"
    problems = [
        InputError(where, got=f"no task {name}", need=need, fix=fix)
        for name in missing
        if name in exact
    ]
    if not missing:
        problems += [
            InputError(where, got=f"also task {name}, which is not evaluated", need=need, fix=fix)
            for name in given.tasks
            if name not in requested
        ]
    raise_all([*problems, *_other_documents(given, requested, limit)])


def _other_documents(
    given: ScoreTable, requested: set[str], limit: float | None
) -> Iterator[InputError]:
    for name in sorted(requested):
        count, original = given.tasks[name].documents, given.tasks[name].full_size
        expected = _expected(original, limit)
        is_cut_off = limit is not None and limit >= 1 and int(limit) < count
        if is_cut_off or (expected is not None and expected != count):
            asks = "all documents" if limit is None else f"the documents of --limit {limit:g}"
            fix = f"use --limit {count}" if original != count else "leave --limit out"
            got, where = f"{count:,} documents", f"{given.file}: task {name}"
            yield InputError(where, got=got, need=asks, fix=fix)


def _expected(original: int | None, limit: float | None) -> int | None:
    """Return the number of documents that lm-eval will use, or None if it is unknown."""
    if original is None or limit is None:
        return original
    return min(original, math.ceil(original * limit) if limit < 1 else int(limit))
