"""Reads lm-eval's output folders, wherever they were made: results_*.json and the samples next to it.

Format: lm_eval/loggers/evaluation_tracker.py (0.4.13). A folder may hold several runs of one model, of
which the newest counts, and lm-eval's command line puts them into a subfolder named after the model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vexport.errors import InputError
from vexport.errors.escaping import clip
from vexport.evaluation.fingerprint import (
    mapping_in,
    read_fingerprint,
    recorded_fingerprint,
    recorded_prompting,
    unseparated_thinking,
)
from vexport.evaluation.samples import TaskSamples, read_samples
from vexport.files import read_json_object
from vexport.records import Json, Prompting

# Of a task: with lm-eval's prefix and date a file's name has at most 255 bytes.
LONGEST_NAME = 200
STAMP = re.compile(r"(\d{4}-\d{2}-\d{2}T[\d.-]+)\.json$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One lm-eval run.

    `tasks` has the samples of every task. `groups` maps a group that lm-eval aggregates to its tasks, leaves
    only. `fingerprint` names what could change a score, `prompting` says how it was asked, `warning` what
    that may have spoiled.
    """

    file: Path
    tasks: Mapping[str, TaskSamples]
    groups: Mapping[str, tuple[str, ...]]
    fingerprint: Mapping[str, str]
    prompting: Prompting
    warning: str | None = None


def read_results(path: Path) -> Results:
    """Read the newest run in an lm-eval output folder, or the run of one results file.

    InputError names the file (and the line) where something is missing or broken: answers are paired by
    their samples, which lm-eval writes with --log_samples.
    """
    file = path if path.is_file() else _newest_results(path)
    content = read_json_object(file)
    names = list(mapping_in(content, "configs"))
    if not names:
        raise InputError(str(file), got="no tasks", need="lm-eval results", fix="evaluate at least one task")
    for name in names:
        _require_plain(file, name)
    return Results(
        file=file,
        tasks={name: _read_task(file, name, content) for name in names},
        groups=_aggregated_groups(content, frozenset(names)),
        fingerprint={**dict(recorded_fingerprint(content, names)), **read_fingerprint(file.parent)},
        prompting=recorded_prompting(content, names),
        warning=unseparated_thinking(content),
    )


def _newest_results(folder: Path) -> Path:
    files = [file for file in folder.rglob("results_*.json") if STAMP.search(file.name) and file.is_file()]
    if not files:
        state = "no results_*.json in it" if folder.is_dir() else "no such folder"
        fix = "check the path; lm-eval writes the folder with --output_path FOLDER --log_samples"
        raise InputError(str(folder), got=state, need="an lm-eval output folder", fix=fix)
    models = sorted({str(file.parent) for file in files})
    if len(models) > 1:
        got = f"results of {len(models)} models ({', '.join(models)})"
        raise InputError(str(folder), got=got, need="one model's results", fix="give one of these folders")
    return max(files, key=lambda file: file.name)


def _require_plain(file: Path, task: str) -> None:
    """A task's name is part of a file's name: it must not lead elsewhere."""
    if not task or Path(task).name != task or not task.isprintable() or len(task.encode()) > LONGEST_NAME:
        got, need = f"a task named {clip(repr(task), 100)}", "a name without folders that is not too long"
        raise InputError(str(file), got=got, need=need, fix="evaluate again with lm-eval")


def _read_task(file: Path, task: str, content: Mapping[str, Json]) -> TaskSamples:
    stamp = STAMP.search(file.name)
    if stamp is None:
        need = "a name that ends in lm-eval's date"
        raise InputError(str(file), got=file.name, need=need, fix="give the folder that lm-eval wrote")
    path = file.with_name(f"samples_{task}_{stamp[1]}.jsonl")
    if not path.exists() and not path.is_symlink():
        where, fix = f"{file}: task {task}", "evaluate again with --log_samples"
        raise InputError(where, got="no samples", need="them, to pair documents", fix=fix)
    output_type = str(mapping_in(mapping_in(content, "configs"), task).get("output_type", ""))
    return read_samples(path, task, output_type=output_type, higher_is_better=_directions(content, task))


def _directions(content: Mapping[str, Json], task: str) -> dict[str, bool]:
    better = mapping_in(mapping_in(content, "higher_is_better"), task)
    return {name: value for name, value in better.items() if isinstance(value, bool)}


def _aggregated_groups(content: Mapping[str, Json], tasks: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """The outermost groups that have an aggregate of their own, with the tasks in them and below."""
    children = {
        name: [str(child) for child in value] if isinstance(value, list) else []
        for name, value in mapping_in(content, "group_subtasks").items()
    }

    def leaves(group: str) -> tuple[str, ...]:
        """The tasks in a group and below it, in order; a group that names itself is gone through once."""
        found, visited, waiting = dict[str, None](), {group}, [group]
        while waiting:
            name = waiting.pop()
            if name in tasks:
                found[name] = None
                continue
            inner = [child for child in dict.fromkeys(children.get(name, ())) if child not in visited]
            visited.update(inner)
            waiting += reversed(inner)
        return tuple(found)

    named = mapping_in(content, "groups")
    groups = {name: members for name in named if (members := leaves(name))}
    sets = [frozenset(members) for members in groups.values()]
    outermost = {members for members in sets if not any(members < outer for outer in sets)}
    return {name: members for name, members in groups.items() if frozenset(members) in outermost}
