"""Read reviews of EvalScope 1.14: `reviews/MODEL/DATASET_SUBSET.jsonl` (CacheManager).

`sample_score` contains the score. `group_id` identifies the document, and `generation_index` is the
seed.
"""

from collections.abc import Mapping
from pathlib import Path

from vexport.errors import InputError, clip
from vexport.foreign import identity, json_lines, text, whole_number
from vexport.outputs.replaceable import resolved
from vexport.records import Json
from vexport.scores.readers.rows import (
    Response,
    require_one_model,
    response_at,
    score_numbers,
    task_table,
    text_or_none,
)
from vexport.scores.table import TaskTable

NAME = "EvalScope"
_SUCCESS = "success"


def review_files(path: Path) -> list[Path]:
    """Return EvalScope's review files below a folder: the files in folders named `reviews`.

    The given folder may also be named `reviews` itself, or be a folder in `reviews`.
    """
    files = [file for file in path.rglob("*.jsonl") if file.is_file()]
    if "reviews" in resolved(path).parts[-2:]:
        return sorted(files)
    return sorted(file for file in files if "reviews" in file.relative_to(path).parts)


def read_reviews(path: Path) -> dict[str, TaskTable]:
    """Read EvalScope's reviews. Each subset of a dataset becomes a task."""
    files = [path] if path.is_file() else review_files(path)
    require_one_model(path, [file.parent for file in files])
    tasks: dict[str, tuple[Path, list[Response]]] = {}
    for file in files:
        for where, row in json_lines(file, "a review of EvalScope"):
            tasks.setdefault(file.stem, (file, []))[1].append(_review(where, row))
    return {name: task_table(NAME, name, file, found) for name, (file, found) in tasks.items()}


def _review(where: str, row: Mapping[str, Json]) -> Response:
    need, fix = "a review of EvalScope 1.x", "evaluate again with EvalScope"
    sample = row.get("sample_score")
    score = sample.get("score") if isinstance(sample, dict) else None
    values = score.get("value") if isinstance(score, dict) else None
    if not isinstance(sample, dict) or not isinstance(score, dict) or not isinstance(values, dict):
        raise InputError(where, got="no sample_score with a score", need=need, fix=fix)
    ids = (sample.get("group_id"), sample.get("sample_id"), row.get("index"))
    document = next((value for value in ids if value is not None), None)
    seed = sample.get("generation_index")
    target = row.get("target")
    status = score.get("status", _SUCCESS)
    is_scored = status == _SUCCESS
    scores = score_numbers(where, values) if is_scored else {}
    main = score.get("main_score_name")
    ordered = sorted(scores, key=lambda name: name != main)
    return response_at(
        where,
        identity(where, "id", document),
        {name: scores[name] for name in ordered},
        seed=None if seed is None else whole_number(where, "generation_index", seed),
        prompt=_prompt_text(row.get("messages")),
        target=", ".join(map(text, target)) if isinstance(target, list) else "",
        text=text_or_none(score.get("prediction")),
        extracted=text_or_none(score.get("extracted_prediction")),
        problem="" if scores else f"its score has the status {clip(text(status), 100)}",
    )


def _prompt_text(messages: Json) -> str:
    """Join the texts of the messages before the model's response."""
    texts = []
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict) or message.get("role") == "assistant":
            break
        content = message.get("content")
        texts.append(text(content))
    return "\n".join(texts)
