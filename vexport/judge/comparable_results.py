"""Check, before a model runs, that existing results can be compared with its results."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vexport.errors import InputError, raise_all
from vexport.judge.accepted import is_accepted, read_accepted
from vexport.scores.harnesses import harness_of
from vexport.scores.results import read_results


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentCounts:
    """Numbers of documents in results that the user gave instead of a model.

    `documents` maps each task to its number of documents. `full_sizes` maps each task to the size
    of its whole data set, if this is recorded. `members` maps each group to its tasks.
    """

    file: Path
    documents: Mapping[str, int]
    full_sizes: Mapping[str, int]
    members: Mapping[str, tuple[str, ...]]


def read_document_counts(path: Path) -> DocumentCounts:
    """Return the numbers of documents in lm-eval's results or in an accepted baseline.

    Raises:
        InputError: If the results are missing or broken, or if another harness wrote them.
    """
    if is_accepted(path):
        accepted = read_accepted(path)
        documents = {name: task.documents for name, task in accepted.tasks.items()}
        return DocumentCounts(
            file=path, documents=documents, full_sizes={}, members=accepted.groups
        )
    harness = harness_of(path)
    if harness != "lm-eval":
        raise InputError(
            str(path),
            got=f"results of {harness}",
            need="lm-eval's results, because vexport also evaluates with lm-eval",
            fix="compare results of two models with `vexport verdict`",
        )
    results = read_results(path)
    counts = {
        name: len({sample.doc_id for sample in task.samples.values()})
        for name, task in results.tasks.items()
    }
    return DocumentCounts(
        file=results.file, documents=counts, full_sizes=results.full_sizes, members=results.members
    )


def require_comparable_results(
    given: DocumentCounts, names: Sequence[str], exact: Sequence[str], limit: float | None
) -> None:
    """Raise InputError if the given results cannot be compared with results of the tasks `names`.

    `exact` are the names from YAML files. These names are certainly tasks. Other names that are
    missing in the results may be tags. lm-eval replaces a tag by its tasks. If a name is missing,
    only the numbers of documents of the known tasks are compared.
    """
    known = {name: given.members.get(name, (name,)) for name in names}
    missing = [
        name for name, members in known.items() if not set(members) <= given.documents.keys()
    ]
    requested = {
        member for name, members in known.items() if name not in missing for member in members
    }
    fix = f"evaluate the tasks of these results: --task {','.join(given.documents)}"
    where, need = str(given.file), "the same tasks on both sides"
    problems = [
        InputError(where, got=f"no task {name}", need=need, fix=fix)
        for name in missing
        if name in exact
    ]
    if not missing:
        problems += [
            InputError(where, got=f"also task {name}, which is not evaluated", need=need, fix=fix)
            for name in given.documents
            if name not in requested
        ]
    raise_all([*problems, *_other_documents(given, requested, limit)])


def _other_documents(
    given: DocumentCounts, requested: set[str], limit: float | None
) -> Iterator[InputError]:
    """Yield an error for every task that will have a different number of documents."""
    for name in sorted(requested):
        count, original = given.documents[name], given.full_sizes.get(name)
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
