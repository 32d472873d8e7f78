"""Read results of other harnesses: lighteval, EvalScope, and plain JSON lines.

- lighteval 0.13 writes `details_TASK|SHOTS_DATE.parquet` (EvaluationTracker.save), with the columns
  `doc`, `metric` and `model_response`.
- EvalScope 1.14 writes `reviews/MODEL/DATASET_SUBSET.jsonl` (CacheManager). `sample_score` contains
  the score. `group_id` identifies the document, and `generation_index` is the seed.
- JSON lines are any `.jsonl` file with `task`, `id`, `score`, and optionally `higher_is_better`,
  `seed`, `answer` and `finish_reason`.

The rows become `Sample` records, as for lm-eval's results. Therefore the same responses lead to the
same verdict for every harness.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vexport.errors import InputError, clip
from vexport.errors.extras import require_extra
from vexport.files import read_json_object
from vexport.foreign import (
    identity,
    is_whole_number,
    json_lines,
    number,
    text,
    whole_number,
)
from vexport.names import TIMESTAMP, result_files
from vexport.outputs.replaceable import resolved
from vexport.records import Json
from vexport.scores.endings import CUT_REASONS, Ending, ending_of
from vexport.scores.parquet_rows import parquet_rows
from vexport.scores.results import Results, Sample, TaskSamples, read_results
from vexport.scores.settings import mapping_in

Harness = Literal["lm-eval", "lighteval", "EvalScope", "JSON lines"]
_SUCCESS = "success"
_DETAILS = "details_"
# The other fields of `model_response` are token ids, which take more space than the texts.
_DETAIL_COLUMNS = (
    *("doc", "metric"),
    *(f"model_response.{name}" for name in ("text", "text_post_processed", "logprobs")),
)
# A length limit that no response reaches. A response then counts as cut only if its finish reason
# is in CUT_REASONS, or if its thinking does not end.
_UNLIMITED_LENGTH = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One scored response of any harness.

    `identity` is the document's id. `seed` is the number of the response, or None if it is unknown.
    If the harness could not score the response, `scores` is empty and `problem` is the reason.
    `text` is None if the response was not stored or not generated. `options` is the number of
    options of a multiple-choice document, else 0. `higher_is_better` is the direction of all
    scores, or None if it was not stated.
    """

    where: str
    identity: str
    scores: Mapping[str, float]
    seed: int | None = None
    prompt: str = ""
    target: str = ""
    text: str | None = None
    extracted: str | None = None
    finish_reason: str | None = None
    options: int = 0
    problem: str = ""
    higher_is_better: bool | None = None


@dataclass(slots=True)
class _Task:
    """Responses to a task, in the order of the rows in its file.

    `directions` has the metrics for which the harness recorded whether higher is better.
    """

    file: Path
    answers: list[Answer] = field(default_factory=list)
    directions: Mapping[str, bool] = field(default_factory=dict)


def read_any_results(path: Path, names: Collection[str] = ()) -> Results:
    """Read results of lm-eval, lighteval, EvalScope, or plain JSON lines.

    `names` selects tasks and groups. Without names, all tasks are read.

    Raises:
        InputError: If the results are missing, broken, or from several harnesses or models.
        MissingPackage: If lighteval's details need pyarrow and it is not installed.
    """
    harness = harness_of(path)
    if harness == "lm-eval":
        return read_results(path, names)
    tasks = {name: _samples(name, task, harness) for name, task in _READERS[harness](path).items()}
    return Results(
        file=path,
        tasks=tasks,
        names=tuple(tasks),
        groups={},
        fingerprint={},
        prompting=None,
        harness=harness,
    ).selected(names)


def harness_of(path: Path) -> Harness:
    """Return the harness that wrote a file or a folder of results.

    Return "lm-eval" for a path without results. The reader of lm-eval's results then raises an
    error with the path.

    Raises:
        InputError: If a folder has results of several harnesses.
    """
    if path.is_file():
        return _harness_of_file(path)
    found: list[Harness] = []
    if any(path.rglob(f"{_DETAILS}*.parquet")):
        found.append("lighteval")
    if _review_files(path):
        found.append("EvalScope")
    has_samples = any(path.rglob("samples_*.jsonl"))
    if has_samples or (not found and result_files(path)):
        found.append("lm-eval")
    if not found and _plain_files(path):
        found.append("JSON lines")
    if len(found) > 1:
        raise InputError(
            str(path),
            got=f"results of {' and '.join(found)}",
            need="results of a single harness",
            fix="give the folder of a single harness",
        )
    return found[0] if found else "lm-eval"


def _harness_of_file(path: Path) -> Harness:
    if path.suffix == ".parquet":
        return "lighteval"
    if path.suffix != ".jsonl":
        return "lm-eval"
    for where, row in json_lines(path, "a scored document"):
        if "sample_score" in row:
            return "EvalScope"
        if "doc_id" in row and "resps" in row:
            fix = "give the folder that lm-eval wrote, with results_*.json in it"
            need = "lm-eval's results"
            raise InputError(where, got="samples of lm-eval alone", need=need, fix=fix)
        break
    return "JSON lines"


def _plain_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.jsonl") if file.is_file())


def _review_files(path: Path) -> list[Path]:
    """Return EvalScope's review files below a folder: the files in folders named `reviews`.

    The given folder may also be named `reviews` itself, or be a folder in `reviews`.
    """
    files = [file for file in path.rglob("*.jsonl") if file.is_file()]
    if "reviews" in resolved(path).parts[-2:]:
        return sorted(files)
    return sorted(file for file in files if "reviews" in file.relative_to(path).parts)


def _require_one_model(path: Path, folders: Sequence[Path]) -> None:
    """Raise InputError if a path contains files of several models."""
    models = sorted({str(folder) for folder in folders})
    if len(models) > 1:
        raise InputError(
            str(path),
            got=f"results of {len(models)} models or runs ({clip(', '.join(models), 200)})",
            need="one model's results",
            fix="give one of these folders",
        )


def _read_plain(path: Path) -> dict[str, _Task]:
    """Read JSON lines with `task`, `id` and `score`."""
    tasks: dict[str, _Task] = {}
    for file in [path] if path.is_file() else _plain_files(path):
        for where, row in json_lines(file, "a scored document"):
            name, answer = _plain_answer(where, row)
            tasks.setdefault(name, _Task(file)).answers.append(answer)
    return tasks


def _plain_answer(where: str, row: Mapping[str, Json]) -> tuple[str, Answer]:
    fix = (
        "write an object per line: task, id, score, and optionally higher_is_better, seed, answer, "
        "finish_reason"
    )
    if missing := [key for key in ("task", "id", "score") if key not in row]:
        raise InputError(where, got=f"no {', '.join(missing)}", need="a scored document", fix=fix)
    task, seed = row["task"], row.get("seed")
    if not isinstance(task, str) or not task:
        raise InputError(where, got=f"task {clip(repr(task), 100)}", need="a name", fix=fix)
    direction = row.get("higher_is_better")
    if direction is not None and not isinstance(direction, bool):
        got = f"higher_is_better {clip(repr(direction), 100)}"
        raise InputError(where, got=got, need="true or false", fix=fix)
    score = row["score"]
    scores = _numbers(where, {"score": score})
    reason = row.get("finish_reason")
    return task, Answer(
        where=where,
        identity=identity(where, "id", row["id"]),
        seed=None if seed is None else whole_number(where, "seed", seed),
        scores=scores,
        text=_text_or_none(row.get("answer")),
        finish_reason=reason if isinstance(reason, str) else None,
        problem="" if scores else "its score is null",
        higher_is_better=direction,
    )


def _text_or_none(value: Json) -> str | None:
    return None if value is None else text(value)


def _numbers(where: str, values: Mapping[str, Json]) -> dict[str, float]:
    """Return the values that are numbers. Skip null and nested values.

    Raises InputError for text, and for numbers that are not finite.
    """
    return {
        text(name): number(where, name, value)
        for name, value in values.items()
        if value is not None and not isinstance(value, list | dict)
    }


def _read_reviews(path: Path) -> dict[str, _Task]:
    """Read EvalScope's reviews. Each subset of a dataset becomes a task."""
    files = [path] if path.is_file() else _review_files(path)
    _require_one_model(path, [file.parent for file in files])
    tasks: dict[str, _Task] = {}
    for file in files:
        for where, row in json_lines(file, "a review of EvalScope"):
            answer = _review(where, row)
            tasks.setdefault(file.stem, _Task(file)).answers.append(answer)
    return tasks


def _review(where: str, row: Mapping[str, Json]) -> Answer:
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
    scores = _numbers(where, values) if is_scored else {}
    main = score.get("main_score_name")
    ordered = sorted(scores, key=lambda name: name != main)
    return Answer(
        where=where,
        identity=identity(where, "id", document),
        seed=None if seed is None else whole_number(where, "generation_index", seed),
        scores={name: scores[name] for name in ordered},
        prompt=_prompt_text(row.get("messages")),
        target=", ".join(map(text, target)) if isinstance(target, list) else "",
        text=_text_or_none(score.get("prediction")),
        extracted=_text_or_none(score.get("extracted_prediction")),
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


def _read_details(path: Path) -> dict[str, _Task]:
    """Read lighteval's details. If a task was evaluated several times, use its newest file."""
    require_extra("pyarrow", "reading lighteval's details")
    files = [path] if path.is_file() else sorted(path.rglob(f"{_DETAILS}*.parquet"))
    _require_one_model(path, [_model_folder(file) for file in files])
    newest = {_task_of(file): file for file in sorted(files, key=_date_of)}
    tasks: dict[str, _Task] = {}
    for name, file in newest.items():
        rows = parquet_rows(file, _DETAIL_COLUMNS, "lighteval's details")
        answers = [_detail(where, row) for where, row in rows]
        tasks[name] = _Task(file, answers, _recorded_directions(_results_beside(file), name))
    return tasks


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
    listed = mapping_in(mapping_in(content, "config_tasks"), task).get("metrics")
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


def _detail(where: str, row: Mapping[str, Json]) -> Answer:
    fix = "evaluate again"
    if missing := {"doc", "metric", "model_response"} - row.keys():
        got = f"no column {', '.join(sorted(missing))}"
        raise InputError(where, got=got, need="lighteval's details", fix=fix)
    doc, metric, response = row["doc"], row["metric"], row["model_response"]
    if not isinstance(doc, dict) or not isinstance(metric, dict) or not isinstance(response, dict):
        raise InputError(where, got="an empty row", need="lighteval's details", fix=fix)
    query = text(doc.get("query") or "")
    listed = doc.get("choices")
    choices = [text(choice) for choice in listed] if isinstance(listed, list) else []
    texts, log_likelihoods = response.get("text"), response.get("logprobs")
    kept = response.get("text_post_processed") or texts
    scores = _numbers(where, metric)
    is_choice = isinstance(log_likelihoods, list) and bool(log_likelihoods) and len(choices) > 1
    document = doc.get("id")
    return Answer(
        where=where,
        identity=text(document) if document not in (None, "") else _digest(query, *choices),
        scores=scores,
        prompt=query,
        target=_gold(choices, doc.get("gold_index")),
        text=_join_texts(kept) if not is_choice else None,
        options=len(choices) if is_choice else 0,
        problem="" if scores else "it has no score that is a number",
    )


def _join_texts(texts: Json) -> str | None:
    """Join the generated texts of a document. Return None if nothing was generated."""
    if not isinstance(texts, list) or not texts:
        return None
    return "\n".join(map(text, texts))


def _gold(choices: Sequence[str], index: Json) -> str:
    indices = index if isinstance(index, list) else [index]
    known = [at for at in indices if isinstance(at, int) and 0 <= at < len(choices)]
    return ", ".join(choices[at] for at in known)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()


_READERS: Mapping[Harness, Callable[[Path], dict[str, _Task]]] = {
    "lighteval": _read_details,
    "EvalScope": _read_reviews,
    "JSON lines": _read_plain,
}


def _samples(name: str, task: _Task, harness: Harness) -> TaskSamples:
    """Return a task's responses as samples, ordered by document and seed.

    Raises:
        InputError: If a document has two responses with the same seed, if documents have different
        numbers of scored responses, or if no response has a score.
    """
    samples: dict[tuple[str, int | str, int], Sample] = {}
    unscored: dict[tuple[int | str, int], str] = {}
    for answer, seed in _with_seeds(task.answers):
        sample = _sample(answer, seed)
        if not answer.scores:
            unscored[sample.doc_id, seed] = answer.problem
            continue
        samples[sample.key] = sample
    if not samples:
        reason = next(iter(unscored.values()), "it has no rows")
        raise InputError(
            f"{task.file}: task {name}",
            got=f"no response with a score ({reason})",
            need="at least one",
            fix=f"evaluate again with {harness}" if harness != "JSON lines" else "write scores",
        )
    _require_regular(task, name, list(samples.values()), unscored)
    ordered = dict(sorted(samples.items(), key=lambda item: _order(item[1])))
    metrics = {metric for sample in samples.values() for metric in sample.scores}
    direction = _stated_direction(task.answers)
    return TaskSamples(
        task=name,
        file=task.file,
        higher_is_better=task.directions
        if direction is None
        else dict.fromkeys(metrics, direction),
        samples=ordered,
        aggregations=dict.fromkeys(metrics, "mean"),
        unscored=unscored,
    )


def _stated_direction(answers: Sequence[Answer]) -> bool | None:
    """Return whether higher is better for a task, or None if no row states it.

    Raises:
        InputError: If two rows state different directions.
    """
    stated = [answer for answer in answers if answer.higher_is_better is not None]
    for answer in stated:
        if answer.higher_is_better != stated[0].higher_is_better:
            raise InputError(
                answer.where,
                got=f"another higher_is_better than in {stated[0].where}",
                need="the same direction in all rows of a task",
                fix="correct one of the two rows",
            )
    return stated[0].higher_is_better if stated else None


def _require_regular(
    task: _Task,
    name: str,
    samples: Sequence[Sample],
    unscored: Mapping[tuple[int | str, int], str],
) -> None:
    """Raise InputError if some documents have fewer scored responses than others."""
    counts: dict[int | str, int] = {}
    for sample in samples:
        counts[sample.doc_id] = counts.get(sample.doc_id, 0) + 1
    most = max(counts.values())
    fewer = [document for document, count in counts.items() if count < most]
    if not fewer:
        return
    document = fewer[0]
    reasons = [reason for (other, _), reason in unscored.items() if other == document]
    why = f" ({reasons[0]})" if reasons else ""
    raise InputError(
        f"{task.file}: task {name}",
        got=f"{counts[document]} scored responses to document {document}{why}, "
        f"{len(fewer)} such documents in all",
        need=f"{most} scored responses to every document",
        fix="evaluate these documents again",
    )


def _order(sample: Sample) -> tuple[bool, int, str, int]:
    is_text = isinstance(sample.doc_id, str)
    number = 0 if isinstance(sample.doc_id, str) else sample.doc_id
    return is_text, number, str(sample.doc_id), sample.seed


def _with_seeds(answers: Sequence[Answer]) -> Iterator[tuple[Answer, int]]:
    """Yield each response with its seed.

    Seeds are renumbered from 0. If the file has no seeds, the responses to a document are numbered
    in their order. This needs the same number of responses for every document.

    Raises:
        InputError: If a document has two responses with the same seed, or if the file has no seeds
        and documents have different numbers of responses.
    """
    counts: dict[str, int] = {}
    for answer in answers:
        if answer.seed is None:
            counts[answer.identity] = counts.get(answer.identity, 0) + 1
    is_regular = len(set(counts.values())) <= 1
    seeds = sorted({answer.seed for answer in answers if answer.seed is not None})
    given = {seed: number for number, seed in enumerate(seeds)}
    seen: dict[tuple[str, int], str] = {}
    numbers: dict[str, int] = {}
    for answer in answers:
        seed = answer.seed
        if seed is None:
            seed = numbers.get(answer.identity, 0) if is_regular else 0
            numbers[answer.identity] = seed + 1
        else:
            seed = given[seed]
        key = answer.identity, seed
        if key in seen:
            which = f"document {answer.identity} twice"
            got = which if answer.seed is None else f"{which} (seed {answer.seed})"
            raise InputError(
                answer.where,
                got=f"{got}, first in {seen[key]}",
                need="each document once, or once for each seed",
                fix="remove one of the two rows, or evaluate again",
            )
        seen[key] = answer.where
        yield answer, seed


def _sample(answer: Answer, seed: int) -> Sample:
    shown = answer.text if answer.text is not None else "(the response was not kept)"
    compared = answer.extracted if answer.extracted is not None else answer.text
    return Sample(
        doc_id=int(answer.identity) if is_whole_number(answer.identity) else answer.identity,
        filter="none",
        hashes=(_digest(answer.identity), _digest(answer.prompt), _digest(answer.target)),
        prompt=answer.prompt,
        target=answer.target,
        shown_text=shown,
        compared_text=compared,
        scores=answer.scores,
        options=answer.options,
        seed=seed,
        ending=_ending(answer),
    )


def _ending(answer: Answer) -> Ending | None:
    """Return how a response ended, or None if its text and finish reason are unknown."""
    reasons = [answer.finish_reason] if answer.finish_reason else []
    if answer.text is None:
        if not reasons:
            return None
        return Ending(state="cut", is_cut=True) if reasons[0] in CUT_REASONS else Ending(state="")
    extracted = answer.extracted if answer.extracted is not None else answer.text
    return ending_of(
        prompt=answer.prompt,
        responses=[answer.text],
        filtered=[extracted],
        reasons=reasons,
        longest=_UNLIMITED_LENGTH,
        is_stripped=False,
    )
