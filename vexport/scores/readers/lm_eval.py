"""Read lm-eval's output folders: results_*.json and the sample files beside them.

lm_eval/loggers/evaluation_tracker.py (0.4.13) defines the format. A folder may contain several
results files of the same model. All of their tasks are read, each from the newest file that has it.
lm-eval's command line writes results into a subfolder with the name of the model.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vexport.errors import InputError, clip
from vexport.files import read_json_object
from vexport.foreign import is_whole_number, json_lines
from vexport.inference.added_keys import FINISH_REASON, SEED
from vexport.inference.fingerprint import read_fingerprint
from vexport.inference.questions import HASHES
from vexport.inference.repeated import read_repeated
from vexport.names import TIMESTAMP, result_files, run_name
from vexport.records import Json, Prompting
from vexport.records.values import join_limited
from vexport.scores.aggregates import NotReadable, numbers_in, softmax
from vexport.scores.endings import Ending, ending_of
from vexport.scores.settings import (
    DEFAULT_LENGTH,
    MAX_NAMED,
    mapping_in,
    model_of,
    recorded_fingerprint,
    recorded_prompting,
    recorded_time,
    unseparated_thinking,
)
from vexport.scores.table import Key, Row, ScoreTable, TaskTable

SCORED_TEXTS = ("loglikelihood", "loglikelihood_rolling")
"""Output types of tasks that score the likelihood of a given text."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def _read_rows(path: Path, *, output_type: str, longest: int, is_stripped: bool) -> dict[Key, Row]:
    """Read a samples file.

    `longest` is the maximum number of new tokens if the task does not set it. `is_stripped` is True
    if finished thinking is removed from responses.

    Raises:
        InputError: If something is missing or broken. The error names the line.
    """
    rows: dict[Key, Row] = {}
    for where, line in json_lines(path, "a sample"):
        row = _read_row(where, line, output_type)
        if output_type == "generate_until":
            row = replace(row, ending=_ending(line, longest, is_stripped=is_stripped))
        if row.key in rows:
            got = f"document {row.doc_id} twice (filter {row.filter})"
            raise InputError(
                where, got=got, need="each document once", fix="evaluate into an empty folder"
            )
        rows[row.key] = row
    if not rows:
        fix = "evaluate again with a higher --limit"
        raise InputError(str(path), got="no documents", need="at least one", fix=fix)
    return rows


def _read_row(where: str, line: dict[str, Json], output_type: str) -> Row:
    required = (
        "doc_id",
        "filter",
        "target",
        "arguments",
        "resps",
        "filtered_resps",
        "metrics",
        *HASHES,
    )
    if missing := [key for key in required if key not in line]:
        fix = "write the samples with lm-eval 0.4.5 or newer"
        raise InputError(
            where, got=f"no {', '.join(missing)}", need="lm-eval's sample keys", fix=fix
        )
    doc_id, metrics, seed = line["doc_id"], line["metrics"], line.get(SEED, 0)
    if type(doc_id) is not int or type(seed) is not int or not isinstance(metrics, list):
        got = f"doc_id {doc_id!r}, {SEED} {seed!r}, metrics {metrics!r}"
        raise InputError(where, got=got, need="integers and a list", fix="evaluate again")
    arguments = [_values(request) for request in _values(line["arguments"])]
    shown_text, compared = _shown_and_compared(
        arguments, line["resps"], line["filtered_resps"], output_type
    )
    recorded = {_text(name): line.get(str(name)) for name in metrics}
    scores = {
        name: _score(value) for name, value in recorded.items() if isinstance(value, int | float)
    }
    values = {name: value for name, value in recorded.items() if name not in scores}
    doc_hash, prompt_hash, target_hash = (str(line[key]) for key in HASHES)
    return Row(
        doc_id=doc_id,
        filter=_text(line["filter"]),
        hashes=(doc_hash, prompt_hash, target_hash),
        prompt=_text(arguments[0][0]) if arguments and arguments[0] else "",
        target=_target(arguments, line["target"], output_type),
        shown_text=shown_text,
        compared_text=compared,
        scores=scores,
        values=_exact_probabilities(values, line["filtered_resps"], output_type),
        options=len(_values(line["filtered_resps"])) if output_type == "multiple_choice" else 0,
        seed=seed,
        log_likelihood=_log_likelihood(line["filtered_resps"])
        if output_type in SCORED_TEXTS
        else None,
    )


def _exact_probabilities(
    values: Mapping[str, Json], filtered: Json, output_type: str
) -> dict[str, Json]:
    """Replace the options' probabilities that lm-eval stored as text by exact probabilities.

    The text has 8 digits (for `brier_score`), but the log-likelihoods of the options have all
    digits. Other values are returned unchanged.
    """
    if output_type != "multiple_choice":
        return dict(values)
    log_likelihoods = [_number(_values(response)) for response in _values(filtered)]
    exact: dict[str, Json] = {}
    for name, value in values.items():
        exact[name] = value
        if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], str):
            continue
        try:
            rounded = numbers_in(value[1])
        except NotReadable:
            rounded = []
        # For acc_mutual_info, lm-eval also scores each option without the question. These extra
        # values follow the values of all options, and are dropped here.
        options = log_likelihoods[: len(rounded) or None]
        probabilities = softmax(options) if all(map(math.isfinite, options)) else []
        if _are_close(rounded or probabilities, probabilities):
            exact[name] = [value[0], list[Json](probabilities)]
    return exact


def _are_close(numbers: Sequence[float], others: Sequence[float]) -> bool:
    if len(numbers) != len(others):
        return False
    pairs = zip(numbers, others, strict=True)
    return bool(numbers) and all(math.isclose(one, other, abs_tol=1e-6) for one, other in pairs)


def _ending(line: Mapping[str, Json], longest: int, *, is_stripped: bool) -> Ending:
    requests = _values(line["arguments"])
    request = _values(requests[0]) if requests else []
    given = request[1] if len(request) > 1 and isinstance(request[1], dict) else {}
    lengths = [value for name in _LENGTHS if isinstance(value := given.get(name), int)]
    return ending_of(
        prompt=_text(request[0]) if request else "",
        responses=list(_texts(line["resps"])),
        filtered=list(_texts(line["filtered_resps"])),
        reasons=[reason for reason in _texts(line.get(FINISH_REASON)) if reason],
        longest=lengths[0] if lengths else longest,
        is_stripped=is_stripped,
    )


def _texts(value: Json) -> Iterator[str]:
    """Yield the texts in nested lists. Other values are yielded as JSON, and null is skipped."""
    if isinstance(value, list):
        for member in value:
            yield from _texts(member)
    elif value is not None:
        yield _text(value)


def _log_likelihood(filtered: Json) -> float | None:
    value = _number(_values(_values(filtered)[:1]))
    return value if math.isfinite(value) else None


def _target(arguments: list[list[Json]], target: Json, output_type: str) -> str:
    """Return the correct answer. For multiple choice, return the text of the correct option."""
    text = _text(target)
    if (
        output_type == "multiple_choice"
        and text.isdecimal()
        and len(text) <= len(str(len(arguments)))
    ):
        return _option(arguments, int(text)) if int(text) < len(arguments) else text
    return text


def _option(arguments: list[list[Json]], index: int) -> str:
    """Return an option's text: its continuation.

    If all options have the same continuation, the prompts differ, and the prompt is returned
    instead.
    """
    shared = len(arguments) > 1 and len({_text(value[-1]) for value in arguments if value}) == 1
    request = arguments[index] if index < len(arguments) else []
    return _text(request[0 if shared else -1]).strip() if request else str(index)


def _shown_and_compared(
    arguments: list[list[Json]], resps: Json, filtered: Json, output_type: str
) -> tuple[str, str]:
    responses = [_values(value) for value in _values(filtered)]
    if output_type == "multiple_choice":
        chosen = max(range(len(responses)), key=lambda index: _number(responses[index]), default=0)
        return _option(arguments, chosen), str(chosen)
    if output_type == "loglikelihood":
        greedy = "True" in [str(value) for response in responses for value in response]
        likeliest = (
            "the target is the likeliest continuation"
            if greedy
            else "another continuation is likelier"
        )
        return likeliest, likeliest
    return _text(_first(resps)), _text(filtered)


def _number(response: list[Json]) -> float:
    """Return the log-likelihood of an option. It is -inf if the value cannot be one."""
    value = _first(response)
    try:
        found = float(value) if isinstance(value, (str, int, float)) else -math.inf
    except (ValueError, OverflowError):
        return -math.inf
    return found if math.isfinite(found) else -math.inf


def _score(value: int | float) -> float:
    """Return the number as a float.

    Integers beyond a float's range, which JSON allows, become infinite.
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _first(value: Json) -> Json:
    while isinstance(value, list) and value:
        value = value[0]
    return value


def _values(value: Json) -> list[Json]:
    """Return the values of lm-eval's {"gen_args_0": ...} objects, or the members of a list."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]


def _text(value: Json) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(
        "utf-8", "replace"
    ).decode()  # JSON may contain half a surrogate pair; UTF-8 cannot


# Maximum length of a task's name in bytes. lm-eval adds a prefix and a date to make a file name,
# and a file name has at most 255 bytes.
LONGEST_NAME = 200


def read_lm_eval(path: Path, names: Collection[str] = ()) -> ScoreTable:
    """Read a results file, or all results files in an lm-eval output folder.

    If several files have a task, the newest file is read. `names` selects tasks and groups. Without
    names, all tasks are read. Names that no file has are ignored.

    Raises:
        InputError: If something is missing or broken, or if the files are of different models. The
        error names the file and the line. Samples are required, because responses are paired.
        lm-eval writes samples with --log_samples.
    """
    paths = [path] if path.is_file() else _dated_files(path)
    contents = {file: read_json_object(file) for file in paths}
    _require_one_model(path, contents)
    newest: dict[str, Path] = {}
    for file, content in contents.items():
        newest |= dict.fromkeys(mapping_in(content, "configs"), file)
    if not newest:
        raise InputError(
            str(paths[-1]), got="no tasks", need="lm-eval results", fix="evaluate at least one task"
        )
    merged = _merged_groups(contents.values())
    members = _members(merged, frozenset(newest))
    wanted = {each for name in names for each in members.get(name, (name,))} or {*newest}
    files = {
        file: in_file
        for file in contents
        if (in_file := tuple(name for name in newest if name in wanted and newest[name] == file))
    }
    older = {name: _larger_older(contents, newest[name], name) for name in newest if name in wanted}
    fingerprint: dict[str, str] = {}
    tasks: dict[str, TaskTable] = {}
    for file, in_file in files.items():
        content = contents[file]
        of_file = {**recorded_fingerprint(content, in_file), **read_fingerprint(file.parent)}
        fingerprint |= of_file
        for name in in_file:
            tasks[name] = replace(
                _read_task(file, name, content),
                larger=older[name][-1] if older[name] else None,
                fingerprint=of_file,
            )
    last = [*files][-1] if files else paths[-1]
    thinking = [unseparated_thinking(contents[file]) for file in files]
    return ScoreTable(
        file=last,
        tasks=tasks,
        names=(*newest, *members),
        groups=_aggregated_groups(merged, frozenset(newest)),
        members=members,
        fingerprint=fingerprint,
        prompting=_prompting(contents, files) if files else None,
        replaced=tuple(_replaced(contents, files, older)),
        warnings=tuple(dict.fromkeys(warning for warning in thinking if warning)),
        measured_at=recorded_time(contents[last]) if files else "",
        repeated=read_repeated(last.parent),
    ).selected(names)


def _dated_files(folder: Path) -> list[Path]:
    files = result_files(folder)
    if not files:
        state = (
            "no results with lm-eval's date (results_*.json) in it"
            if folder.is_dir()
            else "no such folder"
        )
        fix = "check the path; lm-eval writes the folder with --output_path FOLDER --log_samples"
        raise InputError(str(folder), got=state, need="an lm-eval output folder", fix=fix)
    models = sorted({str(file.parent) for file in files})
    if len(models) > 1:
        got = f"results of {len(models)} models ({', '.join(models)})"
        raise InputError(
            str(folder), got=got, need="one model's results", fix="give one of these folders"
        )
    runs = sorted(set(map(run_name, files)))
    if len(runs) > 1:
        got = f"results of {len(runs)} runs ({', '.join(f'{run}_*.json' for run in runs)})"
        raise InputError(
            str(folder), got=got, need="one model's results", fix="give one of these files"
        )
    return sorted(files, key=lambda file: file.name)


def _require_one_model(path: Path, contents: Mapping[Path, Mapping[str, Json]]) -> None:
    models = {file: model_of(content) for file, content in contents.items()}
    named = {model: file for file, model in models.items() if model}
    if len(named) > 1:
        listed = ", ".join(f"{file.name}: {model}" for model, file in named.items())
        raise InputError(
            str(path),
            got=f"results of {len(named)} models ({clip(listed, 400)})",
            need="one model's results",
            fix="give one of these files",
        )


def _larger_older(contents: Mapping[Path, Mapping[str, Json]], file: Path, task: str) -> list[Path]:
    """Return the older files with more documents of a task than `file`, the largest last."""
    paths = [path for path in contents if task in mapping_in(contents[path], "configs")]
    sizes = {path: _documents(contents[path], task) for path in paths}
    return sorted((path for path in paths if sizes[path] > sizes[file]), key=sizes.__getitem__)


def _replaced(
    contents: Mapping[Path, Mapping[str, Json]],
    files: Mapping[Path, Sequence[str]],
    older: Mapping[str, Sequence[Path]],
) -> Iterator[str]:
    """Yield a warning for each file that replaces tasks of an older file with more documents."""
    for file, tasks in files.items():
        replaced: dict[Path, list[str]] = {}
        for name in tasks:
            for path in older[name]:
                replaced.setdefault(path, []).append(name)
        for path, names in replaced.items():
            counts = (_documents(contents[each], names[0]) for each in (file, path))
            judged = " of ".join(f"{count:,}" for count in counts)
            yield (
                f"{join_limited(names, ', ', MAX_NAMED)}: judged on {judged} documents, because "
                f"{file} is newer than {path.name}; give the older file to judge all"
            )


def _documents(content: Mapping[str, Json], task: str) -> int:
    recorded = mapping_in(mapping_in(content, "n-samples"), task).get("effective")
    return recorded if isinstance(recorded, int) else 0


def _merged_groups(contents: Iterable[Mapping[str, Json]]) -> dict[str, Json]:
    """Return the groups of all files. If several files define a group, the newest is used."""
    keys = ("groups", "group_subtasks")
    merged: dict[str, dict[str, Json]] = {key: {} for key in keys}
    for content in contents:
        for key in keys:
            merged[key] |= mapping_in(content, key)
    return dict(merged)


def _prompting(
    contents: Mapping[Path, Mapping[str, Json]], files: Mapping[Path, Sequence[str]]
) -> Prompting:
    """Return the settings of the prompts: of the newest file, and each task's own."""
    recorded = [recorded_prompting(contents[file], tasks) for file, tasks in files.items()]
    template = next((each.chat_template for each in recorded[::-1] if each.chat_template), None)
    plain = [
        name
        for tasks, each in zip(files.values(), recorded, strict=True)
        for name in (tasks if template and not each.chat_template else each.untemplated)
    ]
    return replace(
        recorded[-1],
        chat_template=template,
        num_fewshot={name: count for each in recorded for name, count in each.num_fewshot.items()},
        untemplated=tuple(dict.fromkeys(plain)),
    )


def _read_task(file: Path, task: str, content: Mapping[str, Json]) -> TaskTable:
    # The task's name is part of a file name, so it must not lead to another folder.
    if (
        not task
        or Path(task).name != task
        or not task.isprintable()
        or len(task.encode()) > LONGEST_NAME
    ):
        got, need = (
            f"a task named {clip(repr(task), 100)}",
            "a name without folders that is not too long",
        )
        raise InputError(str(file), got=got, need=need, fix="evaluate again with lm-eval")
    path = _samples_path(file, task)
    if path is None:
        need = "a name that ends in lm-eval's date"
        raise InputError(
            str(file), got=file.name, need=need, fix="give the folder that lm-eval wrote"
        )
    if not path.exists() and not path.is_symlink():
        where, fix = f"{file}: task {task}", "evaluate again with --log_samples"
        raise InputError(where, got="no samples", need="samples, to pair documents", fix=fix)
    config = mapping_in(mapping_in(content, "configs"), task)
    output_type = str(config.get("output_type", ""))
    better = mapping_in(mapping_in(content, "higher_is_better"), task)
    directions = {name: value for name, value in better.items() if isinstance(value, bool)}
    given = recorded_prompting(content, ()).generation
    longest = given.get("max_gen_toks", "")
    rows = _read_rows(
        path,
        output_type=output_type,
        longest=int(longest) if is_whole_number(longest) else DEFAULT_LENGTH,
        is_stripped=bool(given.get("think_end_token")),
    )
    recorded = mapping_in(mapping_in(content, "results"), task)
    numbers = {
        name: _score(value) for name, value in recorded.items() if isinstance(value, int | float)
    }
    size = mapping_in(mapping_in(content, "n-samples"), task).get("original")
    return TaskTable(
        task=task,
        file=path,
        rows=rows,
        higher_is_better=directions,
        aggregations=_aggregations(config),
        aggregates=numbers,
        full_size=size if isinstance(size, int) else None,
    )


def _samples_path(file: Path, task: str) -> Path | None:
    """Return the path of a task's samples, or None if a results file has no date in its name."""
    stamp = TIMESTAMP.search(file.name)
    return file.with_name(f"samples_{task}_{stamp[1]}.jsonl") if stamp else None


def _aggregations(config: Mapping[str, Json]) -> dict[str, str]:
    """Return the aggregation of each metric in a task's configuration, "" if it names none.

    A Python function is recorded as text that is not the name of any aggregation.
    """
    listed = config.get("metric_list")
    return {
        str(entry["metric"]): str(entry.get("aggregation") or "")
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict) and "metric" in entry
    }


def _aggregated_groups(
    content: Mapping[str, Json], tasks: frozenset[str]
) -> dict[str, tuple[str, ...]]:
    """Return the outermost groups that lm-eval aggregates, with all tasks below them."""
    members, named = _members(content, tasks), mapping_in(content, "groups")
    groups = {name: members[name] for name in named if members.get(name)}
    sets = [frozenset(tasks_in) for tasks_in in groups.values()]
    outermost = {tasks_in for tasks_in in sets if not any(tasks_in < outer for outer in sets)}
    return {name: tasks_in for name, tasks_in in groups.items() if frozenset(tasks_in) in outermost}


def _members(content: Mapping[str, Json], tasks: frozenset[str]) -> dict[str, tuple[str, ...]]:
    children = {
        name: [str(child) for child in value] if isinstance(value, list) else []
        for name, value in mapping_in(content, "group_subtasks").items()
    }

    def leaves(group: str, above: tuple[str, ...] = ()) -> Iterator[str]:
        """Yield the tasks in a group and below it, in order.

        A group that contains itself is skipped.
        """
        if group in tasks:
            yield group
        elif group not in above:
            for child in children.get(group, ()):
                yield from leaves(child, (*above, group))

    return {name: tuple(dict.fromkeys(leaves(name))) for name in children}
