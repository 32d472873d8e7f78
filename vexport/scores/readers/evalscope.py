"""Read reviews of EvalScope 1.14: `reviews/MODEL/DATASET_SUBSET.jsonl` (CacheManager).

`sample_score` contains the score. `group_id` identifies the document, and `generation_index` is the
seed.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from vexport.foreign import (
    identity,
    json_lines,
    mapping_in,
    require_fields,
    text,
    whole_number,
)
from vexport.outputs.replaceable import resolved
from vexport.records import Json
from vexport.scores.readers.rows import (
    Response,
    require_one_model,
    row_of,
    score_numbers,
    text_or_none,
)
from vexport.words import clip

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


def read_reviews(path: Path) -> Iterator[Response]:
    """Read EvalScope's reviews. Each subset of a dataset becomes a task."""
    files = [path] if path.is_file() else review_files(path)
    require_one_model(path, [str(file.parent) for file in files])
    for file in files:
        for where, row in json_lines(file, "a review of EvalScope"):
            yield _review(file, where, row)


def _review(file: Path, where: str, row: Mapping[str, Json]) -> Response:
    sample, score = mapping_in(row, "sample_score"), mapping_in(row, "sample_score", "score")
    require_fields(where, score, {"value": dict}, "a review of EvalScope 1.x with a sample_score")
    ids = (sample.get("group_id"), sample.get("sample_id"), row.get("index"))
    document = next((value for value in ids if value is not None), None)
    seed, target = sample.get("generation_index"), row.get("target")
    status, main = score.get("status", _SUCCESS), score.get("main_score_name")
    scores = score_numbers(where, mapping_in(score, "value")) if status == _SUCCESS else {}
    ordered = sorted(scores, key=lambda name: name != main)
    return Response(
        task=file.stem,
        file=file,
        where=where,
        row=row_of(
            identity(where, "id", document),
            {name: scores[name] for name in ordered},
            prompt=_prompt_text(row.get("messages")),
            target=", ".join(map(text, target)) if isinstance(target, list) else "",
            text=text_or_none(score.get("prediction")),
            extracted=text_or_none(score.get("extracted_prediction")),
        ),
        seed=None if seed is None else whole_number(where, "generation_index", seed),
        problem=f"its score has the status {clip(text(status), 100)}",
    )


def _prompt_text(messages: Json) -> str:
    """Join the texts of the messages before the model's response."""
    texts = []
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict) or message.get("role") == "assistant":
            break
        texts.append(text(message.get("content")))
    return "\n".join(texts)
