"""Make the table of a task from the responses in a harness's files.

The readers of lighteval, EvalScope and JSON lines use `task_tables`. The same responses lead to the
same verdict for every harness.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vexport.errors import InputError
from vexport.foreign import is_whole_number, number, text
from vexport.records import Json
from vexport.rules import results as rules
from vexport.scores.endings import ending_of
from vexport.scores.table import Key, Row, TaskTable
from vexport.words import clip

# A length limit that no response reaches. A response then counts as cut only if its finish reason
# is in CUT_REASONS, or if its thinking does not end.
_UNLIMITED_LENGTH = 2**31


class Response(NamedTuple):
    """A response in a harness's file: its task, file, place and row.

    `seed` is the number of the response, or None if it is unknown. The seed of `row` is set later.
    If the harness could not score the response, `problem` is the reason. `directions` has whether
    higher is better, for the metrics for which the file states it.
    """

    task: str
    file: Path
    where: str
    row: Row
    seed: int | None = None
    problem: str = ""
    directions: Mapping[str, bool] = {}


def row_of(
    document: str,
    scores: Mapping[str, float],
    *,
    prompt: str = "",
    target: str = "",
    text: str | None = None,
    extracted: str | None = None,
    finish_reason: str = "",
    options: int = 0,
) -> Row:
    """Return the row of a response to a document.

    `text` is None if the response was not stored or not generated, and `extracted` is the answer in
    it. `options` is the number of options of a multiple-choice document, else 0.
    """
    kept = "(the response was not kept)" if text is None else text
    ending = None
    if finish_reason or text is not None:
        ending = ending_of(
            prompt=prompt,
            responses=[kept],
            filtered=[kept if extracted is None else extracted],
            reasons=[finish_reason] if finish_reason else [],
            longest=_UNLIMITED_LENGTH,
            is_stripped=False,
        )
    return Row(
        doc_id=int(document) if is_whole_number(document) else document,
        filter="none",
        hashes=(digest(document), digest(prompt), digest(target)),
        prompt=prompt,
        target=target,
        shown_text=kept,
        compared_text=text if extracted is None else extracted,
        scores=scores,
        options=options,
        ending=ending,
    )


def digest(*texts: str) -> str:
    """Return a digest of texts that contain no zero bytes."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()


def text_or_none(value: Json) -> str | None:
    """Return a value as text, and None for null."""
    return None if value is None else text(value)


def score_numbers(where: str, values: Mapping[str, Json]) -> dict[str, float]:
    """Return the values that are numbers. Skip null and nested values.

    Raises InputError for text, and for numbers that are not finite.
    """
    return {
        text(name): number(where, name, value)
        for name, value in values.items()
        if value is not None and not isinstance(value, list | dict)
    }


def require_one_model(path: Path, names: Iterable[str]) -> None:
    """Raise InputError if a path contains results of several models or runs with these names."""
    found = sorted(set(names))
    if len(found) > 1:
        listed = clip(", ".join(found), 400)
        raise InputError.of(rules.SEVERAL_MODELS, str(path), count=len(found), found=listed)


def keyed(rows: Iterable[tuple[str, Row]]) -> dict[Key, Row]:
    """Return rows by their keys. Raise InputError if a key occurs twice.

    Each row has its place.
    """
    found: dict[Key, Row] = {}
    places: dict[Key, str] = {}
    for where, row in rows:
        key = row.key
        if key in found:
            raise InputError.of(
                rules.DOCUMENT_TWICE,
                where,
                document=row.doc_id,
                filter=row.filter,
                seed=row.seed,
                first=places[key],
            )
        found[key], places[key] = row, where
    return found


def task_tables(responses: Iterable[Response]) -> dict[str, TaskTable]:
    """Return the tables of all tasks, with rows ordered by document and seed.

    Raises:
        InputError: If a document has two responses with the same seed, if documents have different
        numbers of scored responses, or if no response has a score.
    """
    by_task: dict[str, list[Response]] = {}
    for response in responses:
        by_task.setdefault(response.task, []).append(response)
    return {task: _task_table(task, found) for task, found in by_task.items()}


def _task_table(task: str, responses: Sequence[Response]) -> TaskTable:
    rows = keyed(_with_seeds(responses)).values()
    scored = sorted((row for row in rows if row.scores), key=_order)
    unscored = {
        (row.doc_id, row.seed): response.problem
        for row, response in zip(rows, responses, strict=True)
        if not row.scores
    }
    file = responses[0].file
    where = f"{file}: task {task}"
    if not scored:
        raise InputError.of(rules.NO_SCORE, where, reason=next(iter(unscored.values())))
    _require_equal_counts(where, scored, unscored)
    return TaskTable(
        task=task,
        file=file,
        rows={row.key: row for row in scored},
        higher_is_better=_directions(responses),
        aggregations=dict.fromkeys((metric for row in scored for metric in row.scores), "mean"),
        unscored=unscored,
    )


def _with_seeds(responses: Sequence[Response]) -> Iterator[tuple[str, Row]]:
    """Yield the place and the row of each response, with seeds that are renumbered from 0.

    If the file has no seeds, the responses to a document are numbered in their order. This needs
    the same number of responses for every document. Otherwise all get the seed 0.
    """
    stated = sorted({each.seed for each in responses if each.seed is not None})
    numbers = {seed: number for number, seed in enumerate(stated)}
    counts = Counter(each.row.doc_id for each in responses if each.seed is None)
    is_regular = len({*counts.values()}) <= 1
    before = Counter[int | str]()
    for each in responses:
        document = each.row.doc_id
        if each.seed is not None:
            seed = numbers[each.seed]
        else:
            seed = before[document] if is_regular else 0
            before[document] += 1
        yield each.where, each.row if seed == each.row.seed else replace(each.row, seed=seed)


def _require_equal_counts(
    where: str, rows: Sequence[Row], unscored: Mapping[tuple[int | str, int], str]
) -> None:
    counts = Counter(row.doc_id for row in rows)
    most = max(counts.values())
    fewer = [document for document, count in counts.items() if count < most]
    if fewer:
        reasons = [f" ({why})" for (other, _), why in unscored.items() if other == fewer[0]]
        raise InputError.of(
            rules.UNEQUAL_SEEDS,
            where,
            count=counts[fewer[0]],
            document=fewer[0],
            reason=reasons[0] if reasons else "",
            documents=len(fewer),
            most=most,
        )


def _directions(responses: Sequence[Response]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for each in responses:
        for metric, direction in each.directions.items():
            if found.setdefault(metric, direction) != direction:
                raise InputError.of(rules.OTHER_DIRECTION, each.where)
    return found


def _order(row: Row) -> tuple[bool, int, str, int]:
    is_text = isinstance(row.doc_id, str)
    number = 0 if isinstance(row.doc_id, str) else row.doc_id
    return is_text, number, str(row.doc_id), row.seed
