"""Reuse the settings of an accepted baseline as defaults of a later evaluation.

The file stores the settings of `vexport eval --accept`, and the settings that lm-eval recorded. If
the file was made from existing results, it has recorded settings only. They are no defaults, but a
later call must not contradict them.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from vexport.errors import InputError, InputErrors
from vexport.rules import baseline as rules
from vexport.scenario import Evaluate, Serve
from vexport.scenario.evaluate import ResponseSettings
from vexport.scenario.reading import problems_at
from vexport.scenario.serve import with_options
from vexport.scores.readers.accepted import (
    Accepted,
    choice_of,
    gate_contradictions,
    read_accepted,
)
from vexport.scores.settings import (
    ARGUMENT,
    CHAT_TEMPLATE,
    DEFAULT_LENGTH,
    FEWSHOT,
    GEN_KWARGS,
    MULTITURN,
    SYSTEM_INSTRUCTION,
)

TOOLS = "tools"
PATHS = ("tasks", "include_path", TOOLS)
"""Keys of `Evaluate` with paths of files or folders."""
MAX_MODEL_LEN, DTYPE = "max_model_len", "dtype"
ENGINE = (MAX_MODEL_LEN, DTYPE)
"""Arguments of vLLM that are stored.

Other arguments are not stored: they depend on the machine, or could make vLLM run code. If such an
argument changes, the verdict contains a warning.
"""
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
    stored = {**_paths_to_store(evaluate, file), **stored}
    arguments = serve.given
    return stored | {key: arguments[key] for key in ENGINE if arguments.get(key) is not None}


def _paths_to_store(evaluate: Evaluate, file: Path) -> dict[str, JsonValue]:
    """Return the tasks and task folders of an evaluation, for the accepted baseline in `file`."""
    tasks: list[JsonValue] = [
        _path_to_store(task, file) if _is_file(task) else task for task in evaluate.tasks
    ]
    folders: list[JsonValue] = [_path_to_store(str(path), file) for path in evaluate.include_path]
    stored: dict[str, JsonValue] = {"tasks": tasks}
    if folders:
        stored["include_path"] = folders
    if evaluate.tools is not None:
        stored[TOOLS] = _path_to_store(str(evaluate.tools), file)
    return stored


def with_accepted_settings(
    given: Mapping[str, object], serve: Serve, file: Path, *, command: str
) -> CompletedSettings:
    """Return the given settings, completed with the settings of the accepted baseline in `file`.

    `given` are the keys of `Evaluate` that the user set. Errors name a key as `command: key`.

    Raises:
        InputErrors: If given settings differ from the accepted settings.
    """
    accepted = read_accepted(file)
    named = {key: value for key, value in given.items() if value is not None}
    named_engine = {key: serve.given[key] for key in ENGINE if serve.given.get(key) is not None}
    stored = accepted_settings(accepted)
    problems = [
        *_contradictions(named, stored, accepted, file, command),
        *_engine_contradictions(named_engine, stored, file),
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
    return CompletedSettings(
        file=file,
        keys={**missing, **named},
        serve=with_options(serve, {}, engine),
        filled={**missing, **engine},
    )


def accepted_settings(accepted: Accepted) -> dict[str, JsonValue]:
    """Return the settings of the accepted baseline, by key.

    Paths are relative to the folder of the baseline's file.
    """
    known = (*PATHS, *ResponseSettings.model_fields, *ENGINE)
    settings = accepted.settings or {}
    known_settings = {key: value for key, value in settings.items() if key in known}
    return {"tasks": [*accepted.names], **known_settings}


def _valid_here(key: str, value: JsonValue, file: Path) -> JsonValue:
    """Return a stored setting with paths that are valid in the current folder."""
    if key == TOOLS and isinstance(value, str):
        return _path_here(value, key, file)
    if key not in PATHS or not isinstance(value, list):
        return value
    return [_path_here(each, key, file) if isinstance(each, str) else each for each in value]


def _contradictions(
    named: Mapping[str, object],
    stored: Mapping[str, JsonValue],
    accepted: Accepted,
    file: Path,
    command: str,
) -> Iterator[InputError]:
    """Yield an error for each given setting that differs from the accepted setting."""
    measured = _measured_settings(stored, accepted)
    for key in (key for key in ResponseSettings.model_fields if key in named and key in measured):
        value, old = named[key], measured[key]
        is_same = value == old or _text(value) == _text(old)
        if not is_same and not (key == "limit" and _same_documents(value, stored, accepted)):
            yield _other_setting(f"{command}: {key}", value, old, file)
    gate = named.get("gate")
    if isinstance(gate, Mapping):
        yield from gate_contradictions(choice_of(accepted), gate, f"{command}: gate", file)


def _engine_contradictions(
    named: Mapping[str, object], stored: Mapping[str, JsonValue], file: Path
) -> Iterator[InputError]:
    for key, value in named.items():
        if key in stored and stored[key] != value:
            option = f"--{key.replace('_', '-')}"
            yield _other_setting(option, value, stored[key], file)


def _other_setting(where: str, value: object, accepted: object, file: Path) -> InputError:
    return InputError.of(
        rules.OTHER_SETTING,
        where,
        value=_text(value),
        accepted=_text(accepted),
        file=file,
    )


def _measured_settings(stored: Mapping[str, JsonValue], accepted: Accepted) -> dict[str, JsonValue]:
    """Return the settings of the accepted evaluation: stored, or as the results recorded them.

    Words take the place of a value that is not the same for all tasks. The text of a system
    instruction is unknown if only its digest was recorded. The questions are compared later.
    """
    recorded, tasks = accepted.fingerprint, accepted.tasks
    # By default, the template is not applied to tasks that score plain text. They have no endings.
    is_templated = CHAT_TEMPLATE in recorded
    is_for_all = all(task.endings is not None for task in tasks.values())
    largest = max((task.documents for task in tasks.values()), default=0)
    defaults = ResponseSettings(max_gen_toks=DEFAULT_LENGTH).model_dump(mode="json")
    measured: dict[str, JsonValue] = {
        **{key: recorded.get(f"{ARGUMENT}{key}", value) for key, value in defaults.items()},
        "num_fewshot": ", ".join(
            sorted({recorded.get(f"{FEWSHOT}{task}", "unknown") for task in tasks})
        ),
        "apply_chat_template": "the default" if is_templated and not is_for_all else is_templated,
        "fewshot_as_multiturn": recorded.get(MULTITURN, "false").lower(),
        "gen_kwargs": recorded.get(GEN_KWARGS),
        "limit": recorded.get("limit", f"all documents ({largest:,})"),
    }
    if SYSTEM_INSTRUCTION in recorded:
        del measured["system_instruction"]
    return {**measured, **stored}


def _same_documents(value: object, stored: Mapping[str, JsonValue], accepted: Accepted) -> bool:
    """Return True if a limit selects the same documents as the accepted limit.

    If the accepted limit was larger than a task's number of documents, or if there was no limit,
    the baseline covers the whole task. Then any larger limit has the same effect.
    """
    if not isinstance(value, int | float) or value != int(value):
        return False
    limit = stored.get("limit")
    is_unlimited = limit is None and "limit" not in accepted.fingerprint
    for task in accepted.tasks.values():
        is_whole = is_unlimited or (isinstance(limit, int) and limit > task.documents)
        if value != task.documents and not (is_whole and value > task.documents):
            return False
    return True


def _text(value: object) -> str:
    """Return a value as on the command line or in a scenario."""
    if value is None or value == {}:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool | Mapping | list):
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return str(value)


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
    """Convert a stored path to a path from the current folder. Keep names of tasks."""
    if key == "tasks" and not stored.endswith(_YAML) and not stored.startswith(_PATH_STARTS):
        return stored
    whole = Path(os.path.normpath(file.parent.resolve() / stored))
    here = Path.cwd().resolve()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)
