"""Read lm-eval's output folders: results_*.json and the sample files beside them.

lm_eval/loggers/evaluation_tracker.py (0.4.13) defines the format. A folder may contain several
results files of the same model. All of their tasks are read, each from the newest file that has it.
lm-eval's command line writes results into a subfolder with the name of the model.
"""

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.foreign import (
    LARGEST_SCORE,
    is_whole_number,
    json_lines,
    mapping_in,
    require_fields,
    whole_number,
)
from vexport.foreign import text as clean
from vexport.inference.added_keys import FINISH_REASON, SEED
from vexport.inference.fingerprint import read_fingerprint
from vexport.inference.questions import HASHES
from vexport.inference.repeated import read_repeated
from vexport.inference.shipped import in_order_of_parts
from vexport.names import TIMESTAMP, result_files, run_name
from vexport.records import Json, Prompting
from vexport.records.values import join_limited
from vexport.rules import results as rules
from vexport.scores.aggregates import numbers_in, softmax
from vexport.scores.endings import Ending, ending_of
from vexport.scores.readers.rows import keyed, require_one_model
from vexport.scores.settings import (
    DEFAULT_LENGTH,
    MAX_NAMED,
    model_of,
    recorded_fingerprint,
    recorded_prompting,
    recorded_time,
    unseparated_thinking,
)
from vexport.scores.table import Row, ScoreTable, TaskTable

SCORED_TEXTS = ("loglikelihood", "loglikelihood_rolling")
"""Output types of tasks that score the likelihood of a given text."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_FIELDS = {
    **dict.fromkeys(("filter", "target", "arguments", "resps", "filtered_resps", *HASHES), object),
    "metrics": list,
}


def _read_row(
    where: str, line: Mapping[str, Json], output_type: str, generation: Mapping[str, str]
) -> Row:
    """`generation` are the model's arguments that shape responses (`Prompting.generation`)."""
    require_fields(where, line, _FIELDS, "a sample of lm-eval 0.4.5 or newer")
    arguments = [_values(request) for request in _values(line["arguments"])]
    filtered = _values(line["filtered_resps"])
    is_choice = output_type == "multiple_choice"
    shown_text, compared = _shown_and_compared(arguments, line, output_type)
    recorded = {_text(name): line.get(str(name)) for name in _values(line["metrics"])}
    scores = {
        name: float(value) for name, value in recorded.items() if isinstance(value, int | float)
    }
    values = {name: value for name, value in recorded.items() if name not in scores}
    if is_choice:
        options = [_log_likelihood(response) for response in filtered]
        values = {name: _exact_probabilities(value, options) for name, value in values.items()}
    scored = _log_likelihood(filtered) if output_type in SCORED_TEXTS else -math.inf
    is_generated = output_type == "generate_until"
    return Row(
        doc_id=whole_number(where, "doc_id", line.get("doc_id")),
        filter=_text(line["filter"]),
        hashes=tuple(str(line[key]) for key in HASHES),
        prompt=_text(arguments[0][0]) if arguments and arguments[0] else "",
        target=_target(arguments, _text(line["target"]), is_choice=is_choice),
        shown_text=shown_text,
        compared_text=compared,
        scores=scores,
        values=values,
        options=len(filtered) if is_choice else 0,
        seed=whole_number(where, SEED, line.get(SEED, 0)),
        log_likelihood=scored if math.isfinite(scored) else None,
        ending=_ending(line, arguments, generation) if is_generated else None,
    )


def _exact_probabilities(value: Json, options: Sequence[float]) -> Json:
    """Replace the options' probabilities that lm-eval stored as text by exact probabilities.

    The text has 8 digits (for `brier_score`), but the log-likelihoods of the options have all
    digits. Other values are returned unchanged.
    """
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], str):
        return value
    rounded = numbers_in(value[1]) if "..." not in value[1] else []
    # For acc_mutual_info, lm-eval also scores each option without the question. These extra values
    # follow the values of all options, and are dropped here.
    scored = options[: len(rounded)]
    if not rounded or len(scored) < len(rounded) or not all(map(math.isfinite, scored)):
        return value
    exact = softmax(scored)
    is_same = np.allclose(rounded, exact, rtol=0, atol=1e-6)
    return [value[0], list[Json](exact)] if is_same else value


def _ending(
    line: Mapping[str, Json], arguments: Sequence[list[Json]], generation: Mapping[str, str]
) -> Ending:
    request = arguments[0] if arguments else []
    given = request[1] if len(request) > 1 and isinstance(request[1], dict) else {}
    lengths = [value for name in _LENGTHS if isinstance(value := given.get(name), int)]
    longest = generation.get("max_gen_toks", "")
    default = int(longest) if is_whole_number(longest) else DEFAULT_LENGTH
    return ending_of(
        prompt=_text(request[0]) if request else "",
        responses=list(_texts(line["resps"])),
        filtered=list(_texts(line["filtered_resps"])),
        reasons=[reason for reason in _texts(line.get(FINISH_REASON)) if reason],
        longest=lengths[0] if lengths else default,
        is_stripped=bool(generation.get("think_end_token")),
    )


def _texts(value: Json) -> Iterator[str]:
    """Yield the texts in nested lists. Other values are yielded as JSON, and null is skipped."""
    if isinstance(value, list):
        for member in value:
            yield from _texts(member)
    elif value is not None:
        yield _text(value)


def _target(arguments: Sequence[list[Json]], target: str, *, is_choice: bool) -> str:
    if is_choice and is_whole_number(target) and int(target) < len(arguments):
        return _option(arguments, int(target))
    return target


def _option(arguments: Sequence[list[Json]], index: int) -> str:
    """Return an option's text: its continuation.

    If all options have the same continuation, the prompts differ, and the prompt is returned
    instead.
    """
    shared = len(arguments) > 1 and len({_text(value[-1]) for value in arguments if value}) == 1
    request = arguments[index] if index < len(arguments) else []
    return _text(request[0 if shared else -1]).strip() if request else str(index)


def _shown_and_compared(
    arguments: Sequence[list[Json]], line: Mapping[str, Json], output_type: str
) -> tuple[str, str]:
    filtered = line["filtered_resps"]
    responses = _values(filtered)
    if output_type == "multiple_choice":
        options = range(len(responses))
        chosen = max(options, key=lambda index: _log_likelihood(responses[index]), default=0)
        return _option(arguments, chosen), str(chosen)
    if output_type == "loglikelihood":
        greedy = "True" in [str(value) for response in responses for value in _values(response)]
        likeliest = (
            "the target is the likeliest continuation"
            if greedy
            else "another continuation is likelier"
        )
        return likeliest, likeliest
    return _text(_first(line["resps"])), _text(filtered)


def _log_likelihood(response: Json) -> float:
    """Return the log-likelihood of an option. It is -inf if the value cannot be one."""
    value = _first(response)
    with suppress(ValueError):
        found = float(value) if isinstance(value, str | int | float) else -math.inf
        return found if math.isfinite(found) else -math.inf
    return -math.inf


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
    return clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


_Contents = Mapping[Path, Mapping[str, Json]]


def read_lm_eval(path: Path, names: Collection[str] = ()) -> ScoreTable:
    """Read a results file, or all results files in an lm-eval output folder.

    If several files have a task, the newest file is read. `names` selects tasks and groups. Without
    names, all tasks are read. Names that no file has are ignored.

    Raises:
        InputError: If something is missing or broken, or if the files are of different models. The
        error names the file and the line. Samples are required, because responses are paired.
        lm-eval writes samples with --log_samples.
    """
    contents = {file: read_json_object(file) for file in _dated_files(path)}
    models = {model_of(content): file.name for file, content in contents.items()}
    require_one_model(path, [f"{models[model]}: {model}" for model in models if model])
    newest: dict[str, Path] = {}
    for file, content in contents.items():
        newest |= dict.fromkeys(mapping_in(content, "configs"), file)
    if not newest:
        raise InputError.of(rules.NO_TASK, str([*contents][-1]))
    newest = {name: newest[name] for name in in_order_of_parts([*newest])}
    merged = _merged_groups(contents)
    members = _members(merged, newest.keys())
    wanted = {each for name in names for each in members.get(name, (name,))} or {*newest}
    files: dict[Path, list[str]] = {}
    for file in contents:
        if in_file := [name for name in newest if name in wanted and newest[name] == file]:
            files[file] = in_file
    fingerprint: dict[str, str] = {}
    tasks: dict[str, TaskTable] = {}
    for file, in_file in files.items():
        content = contents[file]
        of_file = {**recorded_fingerprint(content, in_file), **read_fingerprint(file.parent)}
        fingerprint |= of_file
        for name in in_file:
            table = _read_task(file, name, content)
            larger = _larger_older(contents, file, name)
            tasks[name] = replace(table, larger=larger, fingerprint=of_file)
    last = [*(files or contents)][-1]
    thinking = [unseparated_thinking(contents[file]) for file in files]
    return ScoreTable(
        file=last,
        tasks=tasks,
        names=(*newest, *members),
        groups=_aggregated_groups(merged, members),
        members=members,
        fingerprint=fingerprint,
        prompting=_prompting(contents, files) if files else None,
        replaced=tuple(_replaced(contents, newest, tasks)),
        warnings=tuple(dict.fromkeys(warning for warning in thinking if warning)),
        measured_at=recorded_time(contents[last]) if files else "",
        repeated=read_repeated(last.parent),
    ).selected(names)


def _dated_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = result_files(path)
    if not files:
        raise InputError.of(rules.NO_RESULTS if path.is_dir() else rules.NO_FOLDER, str(path))
    require_one_model(path, [str(file.with_name(f"{run_name(file)}_*.json")) for file in files])
    return sorted(files, key=lambda file: file.name)


def _larger_older(contents: _Contents, newest: Path, task: str) -> Path | None:
    """Return the file with the most documents of a task, if it is another than the newest file."""
    sizes = {path: _documents(contents[path], task) for path in contents}
    largest = max(sizes, key=sizes.__getitem__)
    return largest if sizes[largest] > sizes[newest] else None


def _replaced(
    contents: _Contents, newest: Mapping[str, Path], tasks: Mapping[str, TaskTable]
) -> Iterator[str]:
    replaced: dict[tuple[Path, Path], list[str]] = {}
    for name, table in tasks.items():
        if table.larger is not None:
            replaced.setdefault((newest[name], table.larger), []).append(name)
    for (file, larger), names in replaced.items():
        counts = (_documents(contents[each], names[0]) for each in (file, larger))
        judged = " of ".join(f"{count:,}" for count in counts)
        yield (
            f"{join_limited(names, ', ', MAX_NAMED)}: judged on {judged} documents, because "
            f"{file} is newer than {larger.name}; give the older file to judge all"
        )


def _documents(content: Mapping[str, Json], task: str) -> int:
    recorded = mapping_in(content, "n-samples", task).get("effective")
    return recorded if isinstance(recorded, int) else 0


def _merged_groups(contents: _Contents) -> dict[str, Json]:
    """Return the groups of all files. If several files define a group, the newest is used."""
    merged: dict[str, Json] = {}
    for key in ("groups", "group_subtasks"):
        found: dict[str, Json] = {}
        for content in contents.values():
            found |= mapping_in(content, key)
        merged[key] = found
    return merged


def _prompting(contents: _Contents, files: Mapping[Path, Sequence[str]]) -> Prompting:
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
    if Path(task).name != task:
        raise InputError.of(rules.TASK_NAME, str(file), name=task)
    stamp = TIMESTAMP.search(file.name)
    if stamp is None:
        raise InputError.of(rules.FILE_NAME, str(file), name=file.name)
    path = file.with_name(f"samples_{task}_{stamp[1]}.jsonl")
    if not os.path.lexists(path):
        raise InputError.of(rules.NO_SAMPLES, f"{file}: task {task}")
    config = mapping_in(content, "configs", task)
    output_type = str(config.get("output_type", ""))
    generation = recorded_prompting(content, ()).generation
    rows = keyed(
        (where, _read_row(where, line, output_type, generation))
        for where, line in json_lines(path, "a sample")
    )
    if not rows:
        raise InputError.of(rules.NO_DOCUMENT, str(path))
    size = mapping_in(content, "n-samples", task).get("original")
    return TaskTable(
        task=task,
        file=path,
        rows=rows,
        higher_is_better={
            name: value
            for name, value in mapping_in(content, "higher_is_better", task).items()
            if isinstance(value, bool)
        },
        aggregations=_aggregations(config),
        aggregates=_numbers(mapping_in(content, "results", task)),
        full_size=size if isinstance(size, int) else None,
    )


def _numbers(recorded: Mapping[str, Json]) -> dict[str, float]:
    """Return the values that are numbers. Whole numbers may have too many digits for a float."""
    return {
        name: float(value)
        for name, value in recorded.items()
        if isinstance(value, float) or (isinstance(value, int) and abs(value) <= LARGEST_SCORE)
    }


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
    content: Mapping[str, Json], members: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the outermost groups that lm-eval aggregates, with all tasks below them."""
    named = mapping_in(content, "groups")
    groups = {name: members[name] for name in named if members.get(name)}
    sets = [frozenset(tasks) for tasks in groups.values()]
    outermost = {tasks for tasks in sets if not any(tasks < outer for outer in sets)}
    return {name: tasks for name, tasks in groups.items() if frozenset(tasks) in outermost}


def _members(content: Mapping[str, Json], tasks: Collection[str]) -> dict[str, tuple[str, ...]]:
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
