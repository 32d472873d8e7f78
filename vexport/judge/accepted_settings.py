"""Reuse the settings of an accepted baseline as defaults of a later evaluation.

The baseline's file stores the settings of `vexport eval --accept`. Two kinds of files have no
settings: files of older versions, and files that were made from results of lm-eval. For such files,
the settings are recovered from the fingerprint.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from vexport.errors import InputError, InputErrors, raise_all, shown
from vexport.inference.fingerprint import TEMPLATE, Fingerprint
from vexport.inference.tasks import require_known
from vexport.judge.accepted import Accepted, gate_contradictions, read_accepted
from vexport.scenario import Evaluate, Serve
from vexport.scenario.evaluate import ResponseSettings
from vexport.scenario.reading import problems_at
from vexport.scenario.serve import with_options
from vexport.scores.settings import (
    CHAT_TEMPLATE,
    DEFAULT_LENGTH,
    DIGITS,
    ENABLE_THINKING,
    FEWSHOT,
    GEN_KWARGS,
    MAX_GEN_TOKS,
    MULTITURN,
    SYSTEM_INSTRUCTION,
    THINK_END_TOKEN,
)

PATHS = ("tasks", "include_path")
"""Keys of `Evaluate` with paths of files or folders."""
MAX_MODEL_LEN, DTYPE = "max_model_len", "dtype"
ENGINE = (MAX_MODEL_LEN, DTYPE)
"""Arguments of vLLM that are stored.

Other arguments are not stored: they depend on the machine, or could make vLLM run code. If such an
argument changes, the verdict contains a warning.
"""
_SEEDS = "seeds"
_FIX = "leave it out, or accept the baseline again with this value"
_YAML = (".yaml", ".yml")
_PATH_STARTS = ("./", "../", "/")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedSettings:
    """Settings of an evaluation, completed from the accepted baseline in `file`.

    `keys` are the values for `Evaluate`. `serve` are the settings of the engine. `filled` maps each
    setting that was taken from the file to its value.
    """

    file: Path
    keys: Mapping[str, object]
    serve: Serve
    filled: Mapping[str, JsonValue]


def settings_to_store(evaluate: Evaluate, serve: Serve, file: Path) -> dict[str, JsonValue]:
    """Return the settings that change a score, for the accepted baseline in `file`.

    Settings with their default value are left out. Paths below the current folder become relative
    to the folder of `file`. They stay valid if the repository is cloned to another place.
    """
    stored = evaluate.model_dump(
        mode="json", include={*ResponseSettings.model_fields}, exclude_defaults=True
    )
    stored = {**paths_to_store(evaluate, file), **stored}
    arguments = serve.given
    return stored | {key: arguments[key] for key in ENGINE if arguments.get(key) is not None}


def paths_to_store(evaluate: Evaluate, file: Path) -> dict[str, JsonValue]:
    """Return the tasks and task folders of an evaluation, for the accepted baseline in `file`."""
    tasks: list[JsonValue] = [
        _path_to_store(task, file) if _is_file(task) else task for task in evaluate.tasks
    ]
    folders: list[JsonValue] = [_path_to_store(str(path), file) for path in evaluate.include_path]
    return {"tasks": tasks, **({"include_path": folders} if folders else {})}


def with_accepted_settings(
    given: Mapping[str, object], serve: Serve, file: Path, *, command: str
) -> CompletedSettings:
    """Return the given settings, completed with the settings of the accepted baseline in `file`.

    `given` are the keys of `Evaluate` that the user set. Errors name a key as `command: key`.

    Raises:
        InputError: If a given setting differs from the accepted setting, or if the accepted system
            instruction is not given and the file has only its digest. The error lists all such
            settings. Also if a stored path does not exist, or if lm-eval does not have a stored
            task.
    """
    accepted = read_accepted(file)
    named = {key: value for key, value in given.items() if value is not None}
    named_engine = {key: serve.given[key] for key in ENGINE if serve.given.get(key) is not None}
    stored = accepted_settings(accepted)
    problems = [
        *_contradictions(named, stored, accepted, file, command),
        *_engine_contradictions(named_engine, stored, file),
        *_not_stored(named, stored, accepted, file, command),
    ]
    if problems:
        raise InputErrors(problems)
    missing = {
        key: _valid_here(key, value, file)
        for key, value in stored.items()
        if key not in ENGINE and key not in named
    }
    engine = {
        key: value for key, value in stored.items() if key in ENGINE and key not in named_engine
    }
    if accepted.margin is not None and "margin" not in named:
        margin = accepted.margin
        missing["margin"] = dict(margin) if isinstance(margin, Mapping) else margin
    with problems_at(f"{file}: settings"):
        Evaluate.model_validate({"tasks": ("any",), **missing})
    _require_known_tasks({**missing, **named}, "tasks" in named, file)
    return CompletedSettings(
        file=file,
        keys={**missing, **named},
        serve=_with_engine(serve, engine),
        filled={**missing, **engine},
    )


def accepted_settings(accepted: Accepted) -> dict[str, JsonValue]:
    """Return the settings of the accepted baseline, by key.

    Paths are relative to the folder of the baseline's file. If no settings are stored, they are
    recovered from the fingerprint.
    """
    if accepted.settings is None:
        return recovered_settings(accepted.fingerprint, accepted.names, [*accepted.tasks])
    known = (*PATHS, *ResponseSettings.model_fields, *ENGINE)
    settings = {key: value for key, value in accepted.settings.items() if key in known}
    settings.setdefault("tasks", [*accepted.names])
    return settings


def _valid_here(key: str, value: JsonValue, file: Path) -> JsonValue:
    """Return a stored setting with paths that are valid in the current folder."""
    if key not in PATHS:
        return value
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        fix = "restore the file from git, or accept it again"
        raise InputError(f"{file}: settings.{key}", got=shown(value), need="paths", fix=fix)
    return [_path_here(str(each), key, file) for each in value]


def recovered_settings(
    fingerprint: Fingerprint, names: Sequence[str], tasks: Sequence[str]
) -> dict[str, JsonValue]:
    """Return the settings that a fingerprint contains, by key of `Evaluate`.

    `names` are the tasks and groups as the user named them. `tasks` are all tasks, including the
    members of groups. The texts of the chat template and of the system instruction cannot be
    recovered.
    """
    settings: dict[str, JsonValue] = {"tasks": [*names]}
    with suppress(KeyError, ValueError):
        settings["limit"] = _number(fingerprint["limit"])
    counts = {fingerprint.get(f"{FEWSHOT}{task}", "") for task in tasks}
    if len(counts) == 1 and (count := counts.pop()).isdecimal() and len(count) < 16:
        settings["num_fewshot"] = int(count)
    if CHAT_TEMPLATE in fingerprint and fingerprint.get(MULTITURN) == "False":
        settings["fewshot_as_multiturn"] = False
    if CHAT_TEMPLATE not in fingerprint and fingerprint.get(TEMPLATE, "none") != "none":
        settings["apply_chat_template"] = False
    with suppress(KeyError, ValueError):
        generation = json.loads(fingerprint[GEN_KWARGS])
        if isinstance(generation, dict):
            settings["gen_kwargs"] = generation
    with suppress(KeyError, ValueError):
        settings["max_gen_toks"] = int(fingerprint[MAX_GEN_TOKS])
    if THINK_END_TOKEN in fingerprint:
        settings["think_end_token"] = fingerprint[THINK_END_TOKEN]
    if ENABLE_THINKING in fingerprint:
        settings["enable_thinking"] = fingerprint[ENABLE_THINKING] == "true"
    return settings


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number == int(number) else number


def _contradictions(
    named: Mapping[str, object],
    stored: Mapping[str, JsonValue],
    accepted: Accepted,
    file: Path,
    command: str,
) -> Iterator[InputError]:
    """Yield an error for each given setting that differs from the accepted setting."""
    for key in (key for key in ResponseSettings.model_fields if key in named and key != _SEEDS):
        if not _is_same(key, named[key], stored, accepted):
            need = f"{_words(key, stored, accepted)}, as in {file}"
            yield InputError(f"{command}: {key}", got=_text(named[key]), need=need, fix=_FIX)
    if named.get(_SEEDS, 1) != 1:
        got = f"{named[_SEEDS]} responses to each document"
        need = f"one greedy response, as in {file}"
        fix = "leave it out: accepted baselines have greedy responses only"
        yield InputError(f"{command}: {_SEEDS}", got=got, need=need, fix=fix)
    gate = named.get("gate")
    for problem in gate_contradictions(accepted, gate) if isinstance(gate, Mapping) else ():
        yield InputError(
            f"{command}: gate", got=problem.got, need=f"{problem.need} in {file}", fix=problem.fix
        )


def _engine_contradictions(
    named: Mapping[str, object], stored: Mapping[str, JsonValue], file: Path
) -> Iterator[InputError]:
    for key, value in named.items():
        if key in stored and stored[key] != value:
            option = f"--{key.replace('_', '-')}"
            need = f"{_text(stored[key])}, as in {file}"
            yield InputError(option, got=_text(value), need=need, fix=_FIX)


def _not_stored(
    named: Mapping[str, object],
    stored: Mapping[str, JsonValue],
    accepted: Accepted,
    file: Path,
    command: str,
) -> Iterator[InputError]:
    """Yield an error if the accepted system instruction is not given and only its digest is stored.

    All other settings can be taken from the file.
    """
    digest = accepted.fingerprint.get(SYSTEM_INSTRUCTION)
    key = "system_instruction"
    if digest is not None and key not in stored and key not in named:
        got, need = "no text", f"the text with the {digest}"
        fix = f"give the text: {file} has only its digest"
        yield InputError(f"{command}: {key}", got=got, need=need, fix=fix)


def _require_known_tasks(keys: Mapping[str, object], is_named: bool, file: Path) -> None:
    """Raise InputError if the file stores only the name of a task, and lm-eval has no such task."""
    if is_named:
        return
    tasks, folders = keys["tasks"], keys.get("include_path", [])
    assert isinstance(tasks, list)
    assert isinstance(folders, list | tuple)
    problems = []
    for task in (str(task) for task in tasks if not _is_file(str(task))):
        try:
            require_known(task, [Path(str(folder)) for folder in folders])
        except InputError:
            fix = "give its YAML file with --task, or its folder with --include-path"
            got, need = "only its name, and lm-eval has no such task", "the task's YAML file"
            problems.append(InputError(f"{file}: task {task}", got=got, need=need, fix=fix))
    raise_all(problems)


def _is_same(key: str, value: object, stored: Mapping[str, JsonValue], accepted: Accepted) -> bool:
    """Return True if a given setting has the same effect as the accepted setting."""
    if key in stored and stored[key] == value:
        return True
    rule = _SAME_EFFECT.get(key)
    return rule is not None and rule(value, stored, accepted)


def _same_documents(value: object, stored: Mapping[str, JsonValue], accepted: Accepted) -> bool:
    """Return True if a limit selects the same documents as the accepted limit.

    If the accepted limit was larger than a task's number of documents, or if there was no limit,
    the baseline covers the whole task. Then any larger limit has the same effect.
    """
    if not isinstance(value, int | float) or value != int(value):
        return False
    limit = stored.get("limit")
    for task in accepted.tasks.values():
        is_whole = limit is None or (isinstance(limit, int) and limit > task.documents)
        if value != task.documents and not (is_whole and value > task.documents):
            return False
    return True


def _same_examples(value: object, stored: Mapping[str, JsonValue], accepted: Accepted) -> bool:
    counts = {accepted.fingerprint.get(f"{FEWSHOT}{task}") for task in accepted.tasks}
    return "num_fewshot" not in stored and counts == {str(value)}


def _same_template(value: object, stored: Mapping[str, JsonValue], accepted: Accepted) -> bool:
    """Return True if the chat template was applied to the same tasks.

    By default, the template is not applied to tasks that score plain text. Such tasks have no
    `endings`.
    """
    if "apply_chat_template" in stored:
        return False
    if CHAT_TEMPLATE not in accepted.fingerprint:
        return value is False
    return value is True and all(task.endings is not None for task in accepted.tasks.values())


def _same_turns(value: object, stored: Mapping[str, JsonValue], accepted: Accepted) -> bool:
    return accepted.fingerprint.get(MULTITURN, "False") == str(value)


def _same_system_prompt(value: object, stored: Mapping[str, JsonValue], accepted: Accepted) -> bool:
    digest = hashlib.sha256(str(value).encode()).hexdigest()[:DIGITS]
    return accepted.fingerprint.get(SYSTEM_INSTRUCTION) == f"sha {digest}"


def _same_tokens(value: object, stored: Mapping[str, JsonValue], accepted: Accepted) -> bool:
    return stored.get("max_gen_toks", DEFAULT_LENGTH) == value


def _same_seed(value: object, stored: Mapping[str, JsonValue], accepted: Accepted) -> bool:
    return stored.get("seed", 0) == value


_SAME_EFFECT: Mapping[str, Callable[[object, Mapping[str, JsonValue], Accepted], bool]] = {
    "limit": _same_documents,
    "num_fewshot": _same_examples,
    "apply_chat_template": _same_template,
    "fewshot_as_multiturn": _same_turns,
    "system_instruction": _same_system_prompt,
    "max_gen_toks": _same_tokens,
    "seed": _same_seed,
}
"""Rules by key for values that differ from the stored setting but have the same effect."""


def _words(key: str, stored: Mapping[str, JsonValue], accepted: Accepted) -> str:
    """Return the accepted value of a setting in words."""
    if key in stored:
        return _text(stored[key])
    recorded = accepted.fingerprint
    if key == "limit":
        return f"all documents ({max(task.documents for task in accepted.tasks.values()):,})"
    if key == "num_fewshot":
        counts = {task: recorded.get(f"{FEWSHOT}{task}", "unknown") for task in accepted.tasks}
        return ", ".join(f"{count} for {task}" for task, count in counts.items())
    if key == "apply_chat_template":
        return "the default" if CHAT_TEMPLATE in recorded else "no chat template"
    if key == "fewshot_as_multiturn":
        return recorded.get(MULTITURN, "False").lower()
    if key == "system_instruction":
        digest = recorded.get(SYSTEM_INSTRUCTION)
        return "none" if digest is None else f"the text with the {digest}"
    defaults = {"max_gen_toks": str(DEFAULT_LENGTH), "seed": "0", "gen_kwargs": "the tasks' own"}
    return defaults.get(key, "none")


def _text(value: object) -> str:
    """Return a value as on the command line or in a scenario."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool | Mapping | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _with_engine(serve: Serve, engine: Mapping[str, JsonValue]) -> Serve:
    """Return the settings of the engine with stored arguments."""
    dtype = {key: value for key, value in engine.items() if key == DTYPE}
    lengths = {key: value for key, value in engine.items() if key == MAX_MODEL_LEN}
    return with_options(serve, lengths, dtype)


def _is_file(task: str) -> bool:
    """Return True if a task is a YAML file, and not the name of a task."""
    return task.endswith(_YAML) or Path(task).is_file()


def _path_to_store(path: str, file: Path) -> str:
    """Return a path relative to the folder of `file` if it is below the current folder.

    The result differs from every name of a task: it ends like a YAML file or begins like a path.
    """
    whole = Path(path).resolve()
    if not whole.is_relative_to(Path.cwd().resolve()):
        return whole.as_posix()
    relative = Path(os.path.relpath(whole, file.parent.resolve())).as_posix()
    is_plain = not relative.endswith(_YAML) and not relative.startswith(_PATH_STARTS)
    return f"./{relative}" if is_plain else relative


def _path_here(stored: str, key: str, file: Path) -> str:
    """Convert a stored path to a path from the current folder. Keep names of tasks.

    Raises InputError if the path does not exist.
    """
    if key == "tasks" and not stored.endswith(_YAML) and not stored.startswith(_PATH_STARTS):
        return stored
    whole = Path(os.path.normpath(file.parent.resolve() / stored))
    if not whole.exists():
        option = "--task" if key == "tasks" else "--include-path"
        raise InputError(
            f"{file}: settings.{key}",
            got=f"nothing at {whole}",
            need="the task's YAML file" if key == "tasks" else "the folder of the tasks",
            fix=f"restore it, or name its new place with {option}",
        )
    here = Path.cwd().resolve()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)
