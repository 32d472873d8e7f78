"""Read JSON lines: any `.jsonl` file with `task`, `id`, `score`, and optional fields.

The optional fields are `higher_is_better`, `seed`, `answer` and `finish_reason`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from vexport.foreign import identity, json_lines, require_fields, text, whole_number
from vexport.records import Json
from vexport.scores.readers.rows import Response, row_of, score_numbers, text_or_none

NAME = "JSON lines"
_NEED = (
    "an object with task, id, score, and optionally higher_is_better, seed, answer, finish_reason"
)
_KINDS = {"task": str, "id": object, "score": object, "higher_is_better": bool | None}


def plain_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.jsonl") if file.is_file())


def read_plain(path: Path) -> Iterator[Response]:
    """Read JSON lines with `task`, `id` and `score`."""
    for file in [path] if path.is_file() else plain_files(path):
        for where, row in json_lines(file, "a scored document"):
            yield _response(file, where, {"higher_is_better": None, **row})


def _response(file: Path, where: str, row: Mapping[str, Json]) -> Response:
    require_fields(where, {**row, "task": row.get("task") or None}, _KINDS, _NEED)
    seed, reason, direction = row.get("seed"), row.get("finish_reason"), row["higher_is_better"]
    scores = score_numbers(where, {"score": row["score"]})
    return Response(
        task=text(row["task"]),
        file=file,
        where=where,
        row=row_of(
            identity(where, "id", row["id"]),
            scores,
            text=text_or_none(row.get("answer")),
            finish_reason=reason if isinstance(reason, str) else "",
        ),
        seed=None if seed is None else whole_number(where, "seed", seed),
        problem="its score is null",
        directions={} if direction is None else {"score": bool(direction)},
    )
