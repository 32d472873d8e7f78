"""Reads what lm-eval writes, wherever it was made: results_*.json and samples_<task>_*.jsonl.

Format: lm_eval/loggers/evaluation_tracker.py (0.4.13). A folder may hold several runs of one model, of
which the newest counts, and lm-eval's command line puts them into a subfolder named after the model.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.types import Json

STAMP = re.compile(r"(\d{4}-\d{2}-\d{2}T[\d.-]+)\.json$")
HASHES = ("doc_hash", "prompt_hash", "target_hash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One document's answer after one filter; `hashes` are of the document, the prompt and the target.

    `answer` is shown to people (the raw response, or the chosen option); `compared` tells whether two
    answers differ (the filtered response, or the chosen option). `scores` holds the metrics with one
    number a document.
    """

    doc_id: int
    filter: str
    hashes: tuple[str, str, str]
    prompt: str
    target: str
    answer: str
    compared: str
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSamples:
    """All samples of a task, keyed by (filter, doc_id), in the file's order."""

    task: str
    file: Path
    output_type: str
    higher_is_better: Mapping[str, bool]
    samples: Mapping[tuple[str, int], Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One lm-eval run. `groups` maps a group that lm-eval aggregates to its tasks, leaves only."""

    file: Path
    tasks: Mapping[str, TaskSamples]
    groups: Mapping[str, tuple[str, ...]]


def read_results(path: Path) -> Results:
    """Read the newest run in an lm-eval output folder, or the run of one results file.

    InputError names the file (and the line) where something is missing or broken.
    """
    file = path if path.is_file() else _newest_results(path)
    content = read_json_object(file)
    configs = _mapping(content, "configs")
    if not configs:
        raise InputError(str(file), got="no tasks", need="lm-eval results", fix="evaluate at least one task")
    tasks = {task: _read_task(file, task, content) for task in configs}
    return Results(file=file, tasks=tasks, groups=_aggregated_groups(content, frozenset(tasks)))


def _newest_results(folder: Path) -> Path:
    found = [file for file in folder.rglob("results_*.json") if STAMP.search(file.name)]
    if not found:
        state = "no results_*.json in it" if folder.is_dir() else "no such folder"
        fix = "check the path; lm-eval writes the folder with --output_path FOLDER --log_samples"
        raise InputError(str(folder), got=state, need="an lm-eval output folder", fix=fix)
    models = sorted({str(file.parent) for file in found})
    if len(models) > 1:
        got = f"results of {len(models)} models ({', '.join(models)})"
        raise InputError(str(folder), got=got, need="one model's results", fix="give one of these folders")
    return max(found, key=lambda file: file.name)


def _read_task(file: Path, task: str, content: Mapping[str, Json]) -> TaskSamples:
    output_type = str(_mapping(_mapping(content, "configs"), task).get("output_type", ""))
    better = _mapping(_mapping(content, "higher_is_better"), task)
    stamp = STAMP.search(file.name)
    if stamp is None:
        need = "a name that ends in lm-eval's date"
        raise InputError(str(file), got=file.name, need=need, fix="give the folder that lm-eval wrote")
    path = file.with_name(f"samples_{task}_{stamp[1]}.jsonl")
    if not path.is_file():
        fix = "evaluate again with --log_samples"
        raise InputError(str(path), got="no such file", need=f"the samples of task {task}", fix=fix)
    samples: dict[tuple[str, int], Sample] = {}
    for place, line in _json_lines(path):
        sample = _read_sample(place, line, output_type)
        if (key := (sample.filter, sample.doc_id)) in samples:
            got = f"document {sample.doc_id} twice (filter {sample.filter})"
            raise InputError(place, got=got, need="each document once", fix="evaluate into an empty folder")
        samples[key] = sample
    if not samples:
        fix = "evaluate again with a higher --limit"
        raise InputError(str(path), got="no documents", need="at least one", fix=fix)
    higher = {name: value for name, value in better.items() if isinstance(value, bool)}
    return TaskSamples(
        task=task, file=path, output_type=output_type, higher_is_better=higher, samples=samples
    )


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield (file:line, object) for every line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}:{number}"
            try:
                value: Json = json.loads(line)
            except (ValueError, RecursionError) as error:
                fix = "restore the file or evaluate again"
                raise InputError(place, got=f"broken JSON ({error})", need="a sample", fix=fix) from None
            if not isinstance(value, dict):
                got, fix = f"a JSON {type(value).__name__}", "restore the file or evaluate again"
                raise InputError(place, got=got, need="a sample", fix=fix)
            yield place, value


def _read_sample(place: str, line: dict[str, Json], output_type: str) -> Sample:
    required = ("doc_id", "filter", "target", "arguments", "resps", "filtered_resps", "metrics", *HASHES)
    if missing := [key for key in required if key not in line]:
        fix = "write the samples with lm-eval 0.4.5 or newer"
        raise InputError(place, got=f"no {', '.join(missing)}", need="lm-eval's sample keys", fix=fix)
    doc_id, metrics = line["doc_id"], line["metrics"]
    if not isinstance(doc_id, int) or not isinstance(metrics, list):
        got = f"doc_id {doc_id!r}, metrics {metrics!r}"
        raise InputError(place, got=got, need="an integer and a list", fix="evaluate again")
    arguments = [_values(request) for request in _values(line["arguments"])]
    answer, compared = _answers(arguments, line["resps"], line["filtered_resps"], output_type)
    scores = {str(name): line.get(str(name)) for name in metrics}
    doc_hash, prompt_hash, target_hash = (str(line[key]) for key in HASHES)
    return Sample(
        doc_id=doc_id,
        filter=str(line["filter"]),
        hashes=(doc_hash, prompt_hash, target_hash),
        prompt=_text(arguments[0][0]) if arguments and arguments[0] else "",
        target=_target(arguments, line["target"], output_type),
        answer=answer,
        compared=compared,
        scores={
            name: float(value) for name, value in scores.items() if isinstance(value, (bool, int, float))
        },
    )


def _target(arguments: list[list[Json]], target: Json, output_type: str) -> str:
    """The right answer; a multiple-choice target is the number of an option, shown as its text."""
    text = _text(target)
    if output_type == "multiple_choice" and text.isdecimal() and int(text) < len(arguments):
        return _option(arguments, int(text))
    return text


def _option(arguments: list[list[Json]], index: int) -> str:
    """An option's text: the continuation, or the prompt where the options differ in their prompts."""
    shared = len(arguments) > 1 and len({_text(value[-1]) for value in arguments if value}) == 1
    request = arguments[index] if index < len(arguments) else []
    return _text(request[0 if shared else -1]).strip() if request else str(index)


def _answers(arguments: list[list[Json]], resps: Json, filtered: Json, output_type: str) -> tuple[str, str]:
    """The answer to show and the answer to compare."""
    responses = [_values(value) for value in _values(filtered)]
    if output_type == "multiple_choice":
        chosen = max(range(len(responses)), key=lambda index: _number(responses[index]), default=0)
        return _option(arguments, chosen), str(chosen)
    if output_type == "loglikelihood":
        greedy = "True" in [str(value) for response in responses for value in response]
        answer = "the target is the likeliest continuation" if greedy else "another continuation is likelier"
        return answer, answer
    return _text(_first(resps)), _text(filtered)


def _number(response: list[Json]) -> float:
    value = _first(response)
    return float(value) if isinstance(value, (str, int, float)) else float("-inf")


def _first(value: Json) -> Json:
    while isinstance(value, list) and value:
        value = value[0]
    return value


def _values(value: Json) -> list[Json]:
    """The members of lm-eval's {"gen_args_0": ...} objects and of plain lists."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]


def _text(value: Json) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # JSON can spell half a surrogate pair; UTF-8 cannot


def _mapping(content: Mapping[str, Json], key: str) -> dict[str, Json]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _aggregated_groups(content: Mapping[str, Json], tasks: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """The outermost groups that have an aggregate of their own, with the tasks in them and below."""
    children = {
        name: [str(child) for child in _values(value)]
        for name, value in _mapping(content, "group_subtasks").items()
    }

    def leaves(name: str) -> tuple[str, ...]:
        inner = children.get(name)
        if not inner:
            return (name,) if name in tasks else ()
        return tuple(dict.fromkeys(leaf for child in inner for leaf in leaves(child)))

    groups = {name: leaves(name) for name in _mapping(content, "groups") if children.get(name)}
    sets = [set(members) for members in groups.values()]
    return {
        name: members for name, members in groups.items() if not any(set(members) < outer for outer in sets)
    }
