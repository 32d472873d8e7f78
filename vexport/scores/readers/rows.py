"""Make the table of a task from the rows of a harness that has no numbers for its responses.

The readers of lighteval, EvalScope and JSON lines use this module. The same responses lead to the
same verdict for every harness.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vexport.errors import InputError, clip
from vexport.foreign import is_whole_number, number, text
from vexport.records import Json
from vexport.scores.endings import CUT_REASONS, Ending, ending_of
from vexport.scores.table import Key, Row, TaskTable

# A length limit that no response reaches. A response then counts as cut only if its finish reason
# is in CUT_REASONS, or if its thinking does not end.
_UNLIMITED_LENGTH = 2**31


class Response(NamedTuple):
    """A response in a harness's file: its place and its row.

    `seed` is the number of the response, or None if it is unknown. The seed of `row` is set later.
    If the harness could not score the response, `problem` is the reason.
    """

    where: str
    row: Row
    seed: int | None
    problem: str


def response_at(
    where: str,
    document: str,
    scores: Mapping[str, float],
    *,
    seed: int | None = None,
    prompt: str = "",
    target: str = "",
    text: str | None = None,
    extracted: str | None = None,
    finish_reason: str | None = None,
    options: int = 0,
    problem: str = "",
) -> Response:
    """Return a scored response to a document.

    `text` is None if the response was not stored or not generated, and `extracted` is the answer in
    it. `options` is the number of options of a multiple-choice document, else 0.
    """
    row = Row(
        doc_id=int(document) if is_whole_number(document) else document,
        filter="none",
        hashes=(digest(document), digest(prompt), digest(target)),
        prompt=prompt,
        target=target,
        shown_text=text if text is not None else "(the response was not kept)",
        compared_text=extracted if extracted is not None else text,
        scores=scores,
        options=options,
        ending=_ending(prompt, text, extracted, finish_reason),
    )
    return Response(where, row, seed, problem)


def _ending(
    prompt: str, text: str | None, extracted: str | None, finish_reason: str | None
) -> Ending | None:
    """Return how a response ended, or None if its text and finish reason are unknown."""
    if text is None:
        if not finish_reason:
            return None
        return (
            Ending(state="cut", is_cut=True) if finish_reason in CUT_REASONS else Ending(state="")
        )
    return ending_of(
        prompt=prompt,
        responses=[text],
        filtered=[extracted if extracted is not None else text],
        reasons=[finish_reason] if finish_reason else [],
        longest=_UNLIMITED_LENGTH,
        is_stripped=False,
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


def require_one_model(path: Path, folders: Sequence[Path]) -> None:
    """Raise InputError if a path contains files of several models."""
    models = sorted({str(folder) for folder in folders})
    if len(models) > 1:
        raise InputError(
            str(path),
            got=f"results of {len(models)} models or runs ({clip(', '.join(models), 200)})",
            need="one model's results",
            fix="give one of these folders",
        )


def task_table(
    harness: str,
    name: str,
    file: Path,
    responses: Sequence[Response],
    higher_is_better: Mapping[str, bool] | None = None,
) -> TaskTable:
    """Return the table of a task, ordered by document and seed.

    Raises:
        InputError: If a document has two responses with the same seed, if documents have different
        numbers of scored responses, or if no response has a score.
    """
    rows: list[Row] = []
    unscored: dict[tuple[int | str, int], str] = {}
    for row, problem in _with_seeds(responses):
        if row.scores:
            rows.append(row)
        else:
            unscored[row.doc_id, row.seed] = problem
    if not rows:
        reason = next(iter(unscored.values()), "it has no rows")
        raise InputError(
            f"{file}: task {name}",
            got=f"no response with a score ({reason})",
            need="at least one",
            fix=f"evaluate again with {harness}" if harness != "JSON lines" else "write scores",
        )
    _require_regular(f"{file}: task {name}", rows, unscored)
    return TaskTable(
        task=name,
        file=file,
        rows={row.key: row for row in sorted(rows, key=_order)},
        higher_is_better=higher_is_better or {},
        aggregations=dict.fromkeys((metric for row in rows for metric in row.scores), "mean"),
        unscored=unscored,
    )


def _require_regular(
    where: str, rows: Sequence[Row], unscored: Mapping[tuple[int | str, int], str]
) -> None:
    counts: dict[int | str, int] = {}
    for row in rows:
        counts[row.doc_id] = counts.get(row.doc_id, 0) + 1
    most = max(counts.values())
    fewer = [document for document, count in counts.items() if count < most]
    if not fewer:
        return
    document = fewer[0]
    reasons = [reason for (other, _), reason in unscored.items() if other == document]
    why = f" ({reasons[0]})" if reasons else ""
    raise InputError(
        where,
        got=f"{counts[document]} scored responses to document {document}{why}, "
        f"{len(fewer)} such documents in all",
        need=f"{most} scored responses to every document",
        fix="evaluate these documents again",
    )


def _order(row: Row) -> tuple[bool, int, str, int]:
    is_text = isinstance(row.doc_id, str)
    number = 0 if isinstance(row.doc_id, str) else row.doc_id
    return is_text, number, str(row.doc_id), row.seed


def _with_seeds(responses: Sequence[Response]) -> Iterator[tuple[Row, str]]:
    """Yield the row of each response with its seed, and the problem with its score.

    Seeds are renumbered from 0. If the file has no seeds, the responses to a document are numbered
    in their order. This needs the same number of responses for every document.

    Raises:
        InputError: If a document has two responses with the same seed, or if the file has no seeds
        and documents have different numbers of responses.
    """
    counts: dict[int | str, int] = {}
    for each in responses:
        if each.seed is None:
            counts[each.row.doc_id] = counts.get(each.row.doc_id, 0) + 1
    is_regular = len(set(counts.values())) <= 1
    seeds = sorted({each.seed for each in responses if each.seed is not None})
    given = {seed: number for number, seed in enumerate(seeds)}
    seen: dict[Key, str] = {}
    numbers: dict[int | str, int] = {}
    for where, row, stated, problem in responses:
        if stated is None:
            seed = numbers.get(row.doc_id, 0) if is_regular else 0
            numbers[row.doc_id] = seed + 1
        else:
            seed = given[stated]
        row = replace(row, seed=seed)
        if row.key in seen:
            which = f"document {row.doc_id} twice"
            got = which if stated is None else f"{which} (seed {stated})"
            raise InputError(
                where,
                got=f"{got}, first in {seen[row.key]}",
                need="each document once, or once for each seed",
                fix="remove one of the two rows, or evaluate again",
            )
        seen[row.key] = where
        yield row, problem
