"""Read details of lighteval 0.13: `details_TASK|SHOTS_DATE.parquet` (EvaluationTracker.save).

They have the columns `doc`, `metric` and `model_response`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vexport.errors.extras import require_extra
from vexport.files import read_json_object
from vexport.foreign import mapping_in, require_fields, text
from vexport.names import TIMESTAMP
from vexport.records import Json
from vexport.scores.readers.parquet_rows import parquet_rows
from vexport.scores.readers.rows import (
    Response,
    digest,
    require_one_model,
    row_of,
    score_numbers,
)
from vexport.scores.table import Row

NAME = "lighteval"
_DETAILS = "details_"
_NEED = "lighteval's details"
_KINDS = {"doc": dict, "metric": dict, "model_response": dict}
# The other fields of `model_response` are token ids, which take more space than the texts.
_DETAIL_COLUMNS = (
    *("doc", "metric"),
    *(f"model_response.{name}" for name in ("text", "text_post_processed", "logprobs")),
)


def details_files(path: Path) -> list[Path]:
    return sorted(path.rglob(f"{_DETAILS}*.parquet"))


def read_details(path: Path) -> Iterator[Response]:
    """Read lighteval's details. If a task was evaluated several times, use its newest file."""
    require_extra("pyarrow", "reading lighteval's details")
    files = [path] if path.is_file() else details_files(path)
    require_one_model(path, [str(_model_folder(file)) for file in files])
    newest = {_task_of(file): file for file in sorted(files, key=_date_of)}
    for task, file in newest.items():
        directions = _recorded_directions(_results_beside(file), task)
        for where, row in parquet_rows(file, _DETAIL_COLUMNS, _NEED):
            yield Response(
                task=task,
                file=file,
                where=where,
                row=_detail(where, row),
                problem="it has no score that is a number",
                directions=directions,
            )


def _results_beside(file: Path) -> Path | None:
    """Return the results file of the same run as lighteval's details, None if it is missing.

    lighteval writes `details/MODEL/DATE/details_TASK_DATE.parquet` and
    `results/MODEL/results_DATE.json`.
    """
    model = _model_folder(file)
    for folder in model.parents:
        results = folder.parent / "results" / model.relative_to(folder)
        found = results / f"results_{_date_of(file)}.json"
        if folder.name == "details" and found.is_file():
            return found
    return None


def _recorded_directions(results: Path | None, task: str) -> dict[str, bool]:
    """Return whether higher is better, by metric, from lighteval's results file.

    `config_tasks` has a list of metrics for each task. A metric that groups several has a list of
    names, and a direction for each name.
    """
    content = {} if results is None else read_json_object(results)
    listed = mapping_in(content, "config_tasks", task).get("metrics")
    directions: dict[str, Json] = {}
    for metric in listed if isinstance(listed, list) else []:
        if isinstance(metric, dict):
            better = metric.get("higher_is_better")
            single = {str(metric.get("metric_name")): better}
            directions |= better if isinstance(better, dict) else single
    return {name: value for name, value in directions.items() if isinstance(value, bool)}


def _model_folder(file: Path) -> Path:
    """Return the model's folder. lighteval writes each run into a subfolder named by the date."""
    return file.parent.parent if file.parent.name == _date_of(file) else file.parent


def _task_of(file: Path) -> str:
    """Return `gsm8k|5` for `details_gsm8k|5_2026-11-27T10-00-00.123456.parquet`."""
    stem = file.stem.removeprefix(_DETAILS)
    return stem.removesuffix(f"_{_date_of(file)}")


def _date_of(file: Path) -> str:
    found = TIMESTAMP.search(f"{file.stem}.json")
    return found[1] if found else ""


def _detail(where: str, row: Mapping[str, Json]) -> Row:
    require_fields(where, row, _KINDS, _NEED)
    doc, metric, response = (mapping_in(row, name) for name in _KINDS)
    query = text(doc.get("query") or "")
    listed = doc.get("choices")
    choices = [text(choice) for choice in listed] if isinstance(listed, list) else []
    texts, log_likelihoods = response.get("text"), response.get("logprobs")
    kept = response.get("text_post_processed") or texts
    is_choice = isinstance(log_likelihoods, list) and bool(log_likelihoods) and len(choices) > 1
    document = doc.get("id")
    return row_of(
        text(document) if document not in (None, "") else digest(query, *choices),
        score_numbers(where, metric),
        prompt=query,
        target=_gold(choices, doc.get("gold_index")),
        text=_join_texts(kept) if not is_choice else None,
        options=len(choices) if is_choice else 0,
    )


def _join_texts(texts: Json) -> str | None:
    if not isinstance(texts, list) or not texts:
        return None
    return "\n".join(map(text, texts))


def _gold(choices: Sequence[str], index: Json) -> str:
    indices = index if isinstance(index, list) else [index]
    known = [at for at in indices if isinstance(at, int) and 0 <= at < len(choices)]
    return ", ".join(choices[at] for at in known)
