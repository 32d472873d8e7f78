"""Reads lm-eval's samples_<task>_*.jsonl: each document's prompt, answer and scores.

Format: lm_eval/loggers/evaluation_tracker.py (0.4.13).
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vexport.errors import InputError, require_working_disk
from vexport.files import require_no_device
from vexport.records import Json

SEED = "vexport_seed"
"""The key of a sample's seed, where several answers were sampled for a document."""
HASHES = ("doc_hash", "prompt_hash", "target_hash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One document's answer after one filter; `hashes` are of the document, the prompt and the target.

    `answer` is shown to people (the raw response, or the chosen option); `compared` tells whether two
    answers differ (the filtered response, or the chosen option). `scores` holds the metrics with one
    number a document. `options` counts those of a multiple choice, 0 of other documents.
    """

    doc_id: int
    filter: str
    hashes: tuple[str, str, str]
    prompt: str
    target: str
    answer: str
    compared: str
    scores: Mapping[str, float]
    options: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSamples:
    """All samples of a task, keyed by (filter, doc_id, seed), in the file's order.

    Answers that were sampled for one document have the seeds 0, 1, ...; a single answer has 0.
    """

    task: str
    file: Path
    output_type: str
    higher_is_better: Mapping[str, bool]
    samples: Mapping[tuple[str, int, int], Sample]


def read_samples(
    path: Path, task: str, *, output_type: str, higher_is_better: Mapping[str, bool]
) -> TaskSamples:
    """Read one samples file. InputError names the line where something is missing or broken."""
    samples: dict[tuple[str, int, int], Sample] = {}
    for where, line in _json_lines(path):
        sample = _read_sample(where, line, output_type)
        if (key := (sample.filter, sample.doc_id, sample.seed)) in samples:
            got = f"document {sample.doc_id} twice (filter {sample.filter})"
            raise InputError(where, got=got, need="each document once", fix="evaluate into an empty folder")
        samples[key] = sample
    if not samples:
        fix = "evaluate again with a higher --limit"
        raise InputError(str(path), got="no documents", need="at least one", fix=fix)
    return TaskSamples(
        task=task, file=path, output_type=output_type, higher_is_better=higher_is_better, samples=samples
    )


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Json]]]:
    """(file:line, object) for every line."""
    require_no_device(path)
    fix = "restore the file or evaluate again"
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                try:
                    value: Json = json.loads(line)
                except (ValueError, RecursionError) as error:
                    got = f"broken JSON ({error})"
                    raise InputError(where, got=got, need="a sample", fix=fix) from None
                if not isinstance(value, dict):
                    raise InputError(where, got=f"a JSON {type(value).__name__}", need="a sample", fix=fix)
                yield where, value
    except OSError as error:
        require_working_disk(error, path)
        got = error.strerror or str(error)
        raise InputError(str(path), got=got, need="a file that can be read", fix="check it") from None


def _read_sample(where: str, line: dict[str, Json], output_type: str) -> Sample:
    required = ("doc_id", "filter", "target", "arguments", "resps", "filtered_resps", "metrics", *HASHES)
    if missing := [key for key in required if key not in line]:
        fix = "write the samples with lm-eval 0.4.5 or newer"
        raise InputError(where, got=f"no {', '.join(missing)}", need="lm-eval's sample keys", fix=fix)
    doc_id, metrics, seed = line["doc_id"], line["metrics"], line.get(SEED, 0)
    if type(doc_id) is not int or type(seed) is not int or not isinstance(metrics, list):
        got = f"doc_id {doc_id!r}, {SEED} {seed!r}, metrics {metrics!r}"
        raise InputError(where, got=got, need="integers and a list", fix="evaluate again")
    arguments = [_values(request) for request in _values(line["arguments"])]
    answer, compared = _answers(arguments, line["resps"], line["filtered_resps"], output_type)
    scores = ((_text(name), line.get(str(name))) for name in metrics)
    doc_hash, prompt_hash, target_hash = (str(line[key]) for key in HASHES)
    return Sample(
        doc_id=doc_id,
        filter=_text(line["filter"]),
        hashes=(doc_hash, prompt_hash, target_hash),
        prompt=_text(arguments[0][0]) if arguments and arguments[0] else "",
        target=_target(arguments, line["target"], output_type),
        answer=answer,
        compared=compared,
        scores={name: as_float(value) for name, value in scores if isinstance(value, (bool, int, float))},
        options=len(_values(line["filtered_resps"])) if output_type == "multiple_choice" else 0,
        seed=seed,
    )


def _target(arguments: list[list[Json]], target: Json, output_type: str) -> str:
    """The right answer; a multiple-choice target is the number of an option, shown as its text."""
    text = _text(target)
    if output_type == "multiple_choice" and text.isdecimal() and len(text) <= len(str(len(arguments))):
        return _option(arguments, int(text)) if int(text) < len(arguments) else text
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
    try:
        return float(value) if isinstance(value, (str, int, float)) else -math.inf
    except (ValueError, OverflowError):
        return -math.inf


def as_float(value: bool | int | float) -> float:
    """The number; JSON can spell integers beyond a float's range, which become infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


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
