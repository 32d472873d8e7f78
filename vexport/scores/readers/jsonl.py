"""Read JSON lines: any `.jsonl` file with `task`, `id`, `score`, and optional fields.

The optional fields are `higher_is_better`, `seed`, `answer` and `finish_reason`.
"""

from collections.abc import Mapping
from pathlib import Path

from vexport.errors import InputError, clip
from vexport.foreign import identity, json_lines, whole_number
from vexport.records import Json
from vexport.scores.readers.rows import (
    Response,
    response_at,
    score_numbers,
    task_table,
    text_or_none,
)
from vexport.scores.table import TaskTable

NAME = "JSON lines"
_FIX = (
    "write an object per line: task, id, score, and optionally higher_is_better, seed, answer, "
    "finish_reason"
)


def plain_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.jsonl") if file.is_file())


def read_plain(path: Path) -> dict[str, TaskTable]:
    """Read JSON lines with `task`, `id` and `score`."""
    files: dict[str, Path] = {}
    responses: dict[str, list[Response]] = {}
    stated: dict[str, tuple[str, bool]] = {}
    for file in [path] if path.is_file() else plain_files(path):
        for where, row in json_lines(file, "a scored document"):
            task, direction = _task_and_direction(where, row)
            files.setdefault(task, file)
            responses.setdefault(task, []).append(_response(where, row))
            if direction is not None:
                _require_same_direction(
                    where, direction, stated.setdefault(task, (where, direction))
                )
    return {
        task: task_table(
            NAME, task, files[task], found, {"score": stated[task][1]} if task in stated else {}
        )
        for task, found in responses.items()
    }


def _task_and_direction(where: str, row: Mapping[str, Json]) -> tuple[str, bool | None]:
    if missing := [key for key in ("task", "id", "score") if key not in row]:
        raise InputError(where, got=f"no {', '.join(missing)}", need="a scored document", fix=_FIX)
    task, direction = row["task"], row.get("higher_is_better")
    if not isinstance(task, str) or not task:
        raise InputError(where, got=f"task {clip(repr(task), 100)}", need="a name", fix=_FIX)
    if direction is not None and not isinstance(direction, bool):
        got = f"higher_is_better {clip(repr(direction), 100)}"
        raise InputError(where, got=got, need="true or false", fix=_FIX)
    return task, direction


def _response(where: str, row: Mapping[str, Json]) -> Response:
    seed, reason = row.get("seed"), row.get("finish_reason")
    scores = score_numbers(where, {"score": row["score"]})
    return response_at(
        where,
        identity(where, "id", row["id"]),
        scores,
        seed=None if seed is None else whole_number(where, "seed", seed),
        text=text_or_none(row.get("answer")),
        finish_reason=reason if isinstance(reason, str) else None,
        problem="" if scores else "its score is null",
    )


def _require_same_direction(where: str, direction: bool, first: tuple[str, bool]) -> None:
    if direction != first[1]:
        raise InputError(
            where,
            got=f"another higher_is_better than in {first[0]}",
            need="the same direction in all rows of a task",
            fix="correct one of the two rows",
        )
