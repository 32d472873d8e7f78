"""Turns the tasks a person names into tasks that lm-eval can run from any folder.

A task is a name that lm-eval knows or a YAML file, of a task or of a group of tasks. YAML files are read
here without running anything, their includes merged, their data files made absolute, and written into the
run's own folder.
"""

import difflib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import yaml

from vexport.errors import InputError, raise_all
from vexport.files import write_text

REQUIRED_KEYS = ("task", "dataset_path")
GROUP_KEYS = ("group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag")
GROUP_SUFFIX = ".group.yaml"
"""How the file of a group ends: lm-eval 0.4.13 cannot be given a group's file, only its folder and name."""
FILE_FORMATS = {"json", "csv", "parquet", "arrow", "text", "xml", "pandas", "webdataset", "hdf5"}
"""The `dataset_path` of documents that lie in `data_files` (datasets/packaged_modules)."""
EVALUATION_SPLITS = ("test_split", "validation_split")
_INDEXED = re.compile(
    rb"^[ \t-]*(?:task|group|tag)[ \t]*:[ \t]*[\"']?([\w.+-]+)|^[ \t]*-[ \t]*[\"']?([\w.+-]+)", re.M
)
_INCLUDED = re.compile(rb"([\w./-]+[.]ya?ml)\b")

Config = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """A task of lm-eval; `path` is its resolved YAML file, None for a task from lm-eval's own folders."""

    name: str
    path: Path | None

    @property
    def spec(self) -> str:
        """What lm-eval's TaskManager is given."""
        return str(self.path or self.name)


@dataclass(frozen=True, slots=True)
class _Function:
    """A `!function module.name` tag: Python that lm-eval would import from a file in `folder`, if there."""

    name: str
    folder: Path

    @property
    def module(self) -> Path:
        return self.folder / f"{self.name.rpartition('.')[0]}.py"


def resolve_tasks(
    tasks: Sequence[str], *, folder: Path, include_paths: Sequence[Path] = (), trust_remote_code: bool = False
) -> tuple[TaskFile, ...]:
    """Resolve every task; write the YAML ones to `folder`/<task>/<task>.yaml. Runs no Python of a task.

    InputError, for all tasks at once: a file that is missing or broken, a missing key or data file, a
    `!function` tag without `trust_remote_code`, a name that lm-eval does not know, a name given twice.
    """
    resolved: list[TaskFile] = []
    problems: list[InputError] = []
    for task in tasks:
        try:
            task_file = _resolve(task, folder, include_paths, trust_remote_code)
            if any(task_file.name == other.name for other in resolved):
                fix = "give it once, or rename one (key `task`)"
                raise InputError(f"task {task}", got=f"a second task {task_file.name}", need="one", fix=fix)
            resolved.append(task_file)
        except InputError as problem:
            problems.append(problem)
    raise_all(problems)
    return tuple(resolved)


def _resolve(task: str, folder: Path, include_paths: Sequence[Path], trust: bool) -> TaskFile:
    path = Path(task)
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        _require_known(task, include_paths)
        if not trust:
            _require_no_python(task, include_paths)
        return TaskFile(name=task, path=None)
    config = _load(path, trust, ())
    if isinstance(config.get("task"), list):
        config, suffix = _inlined(path, config, trust), GROUP_SUFFIX
        name = str(config["group"])
    else:
        _require_complete(path, config)
        name, suffix = str(config["task"]), ".yaml"
    target = folder.resolve() / name / f"{name}{suffix}"
    target.parent.mkdir(parents=True, exist_ok=True)
    for module in _modules(config):
        shutil.copy2(module, target.parent / module.name)
    write_text(target, yaml.dump(config, Dumper=_Dumper, allow_unicode=True, sort_keys=False))
    return TaskFile(name=name, path=target)


def _inlined(path: Path, config: Config, trust: bool) -> Config:
    """A group with the keys of its tasks written into it, as lm-eval reads them too."""
    name = config.get("group")
    if not isinstance(name, str) or Path(name).name != name:
        need, fix = "the group's name, fit for a file", "add the key group"
        raise InputError(f"{path}: group", got=repr(name), need=need, fix=fix)
    given = config["task"]
    assert isinstance(given, list)
    shared = {key: value for key, value in config.items() if key not in GROUP_KEYS}
    members = [_member(path, member, trust) for member in given]
    if not members:
        raise InputError(f"{path}: task", got="no tasks", need="at least one", fix="name the group's tasks")
    for member in members:
        _require_complete(path, shared | member)
    return config | {"task": members}


def _member(path: Path, member: object, trust: bool) -> Config:
    """The keys of a group's task: written there, or in a YAML file next to the group's."""
    if isinstance(member, dict):
        return _absolute({str(key): value for key, value in member.items()}, path.parent.resolve())
    file = path.parent / (name if (name := str(member)).endswith((".yaml", ".yml")) else f"{name}.yaml")
    return _load(file, trust, (path.resolve(),))


def _load(path: Path, trust: bool, above: tuple[Path, ...]) -> Config:
    """The file's keys over those of the files it includes, with paths made absolute."""
    if path.resolve() in above:
        raise InputError(str(path), got="an include of itself", need="no cycle", fix="remove the include")
    config = _parse(path, trust)
    includes = config.pop("include", [])
    merged: Config = {}
    for include in includes if isinstance(includes, list) else [includes]:
        merged |= _load(path.parent / str(include), trust, (*above, path.resolve()))
    return merged | _absolute(config, path.parent.resolve())


def _parse(path: Path, trust: bool) -> Config:
    try:
        loader = (_TrustingLoader if trust else _Loader)(path.read_bytes())
        loader.name = str(path)
        config = loader.get_single_data()
    except FileNotFoundError:
        raise InputError(str(path), got="no such file", need="a task's YAML", fix="check the path") from None
    except OSError as error:
        raise InputError(str(path), got=str(error), need="a task's YAML", fix="check the path") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        got = error.problem or "broken YAML"
        raise InputError(f"{path}:{line}", got=got, need="a task's YAML", fix=_fix(got)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        got = f"broken YAML ({error})"
        raise InputError(str(path), got=got, need="a task's YAML", fix="fix the file") from None
    if not isinstance(config, dict):
        got = f"a {type(config).__name__}"
        raise InputError(str(path), got=got, need="a mapping of a task's keys", fix="fix the file")
    return {str(key): value for key, value in config.items()}


def _fix(got: str) -> str:
    return "add --trust-remote-code if you trust the file" if "!function" in got else "fix the file"


class _Loader(yaml.SafeLoader):
    """YAML without Python; `!function` is refused."""


class _TrustingLoader(yaml.SafeLoader):
    """YAML that keeps `!function` for lm-eval."""


class _Dumper(yaml.SafeDumper):
    """Writes `!function` back."""


def _refuse(loader: yaml.SafeLoader, node: yaml.Node) -> None:
    problem = f"!function {node.value}, Python that would be run"
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _keep(loader: yaml.SafeLoader, node: yaml.Node) -> _Function:
    return _Function(str(node.value), Path(loader.name).parent)


_Loader.add_constructor("!function", _refuse)
_TrustingLoader.add_constructor("!function", _keep)
_Dumper.add_representer(_Function, lambda dumper, tag: dumper.represent_scalar("!function", tag.name))


def _absolute(config: Config, base: Path) -> Config:
    """Make `data_files`, `data_dir` and a dataset folder absolute; URLs stay."""

    def absolute(value: object) -> object:
        if isinstance(value, dict):
            return {key: absolute(member) for key, member in value.items()}
        if isinstance(value, list):
            return [absolute(member) for member in value]
        return str(base / value) if isinstance(value, str) and "://" not in value else value

    absolute_config = dict(config)
    if isinstance(kwargs := config.get("dataset_kwargs"), dict):
        local = {key: absolute(kwargs[key]) for key in ("data_files", "data_dir") if key in kwargs}
        absolute_config["dataset_kwargs"] = kwargs | local
    dataset = config.get("dataset_path")
    if isinstance(dataset, str) and dataset.startswith(("./", "../")):
        absolute_config["dataset_path"] = str((base / dataset).resolve())
    return absolute_config


def _require_complete(path: Path, config: Config) -> None:
    missing = [key for key in REQUIRED_KEYS if not isinstance(config.get(key), str)]
    if not any(config.get(key) for key in EVALUATION_SPLITS):
        missing.append(" or ".join(EVALUATION_SPLITS))
    if config.get("output_type") != "loglikelihood_rolling" and "doc_to_target" not in config:
        missing.append("doc_to_target")
    problems = [InputError(str(path), got=f"no key {key}", need="it", fix="add it") for key in missing]
    name = str(config.get("task"))
    if Path(name).name != name:
        fix = "use letters, digits, - and _"
        problems.append(InputError(f"{path}: task", got=name, need="a name fit for a file", fix=fix))
    for file in _data_files(config):
        if not list(file.parent.glob(file.name)):
            fix = "check dataset_kwargs.data_files; paths are relative to the YAML file"
            problems.append(InputError(str(path), got=f"no file {file}", need="the task's data", fix=fix))
    raise_all(problems)


def reads_hub(spec: str) -> bool:
    """Whether a resolved task (`TaskFile.spec`), or one of a group, has documents that are no local files."""
    path = Path(spec)
    if not path.is_file():
        return True
    config = _parse(path, trust=True)
    members = config["task"] if isinstance(config.get("task"), list) else [config]
    assert isinstance(members, list)
    merged = [{**config, **member} if isinstance(member, dict) else config for member in members]
    return not all(
        is_local_dataset(str(one.get("dataset_path")), one.get("dataset_kwargs")) for one in merged
    )


def is_local_dataset(dataset: str, kwargs: object) -> bool:
    """Whether `datasets` finds a task's documents without the network."""
    if not isinstance(kwargs, dict):
        return Path(dataset).is_dir()
    urls = any("://" in value for value in _texts([kwargs.get("data_files"), kwargs.get("data_dir")]))
    return not urls and (Path(dataset).is_dir() or dataset in FILE_FORMATS)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _texts(member)


def _data_files(config: Config) -> Iterator[Path]:
    kwargs = config.get("dataset_kwargs")
    pending = [kwargs.get("data_files")] if isinstance(kwargs, dict) else []
    while pending:
        value = pending.pop()
        if isinstance(value, str) and "://" not in value:
            yield Path(value)
        elif isinstance(value, (dict, list)):
            pending.extend(value.values() if isinstance(value, dict) else value)


def _modules(value: object) -> Iterator[Path]:
    """The Python files that the `!function` tags name, as far as they lie next to their YAML."""
    if isinstance(value, _Function):
        yield from (value.module,) if value.module.is_file() else ()
    elif isinstance(value, (Mapping, list)):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from _modules(member)


def _require_known(name: str, include_paths: Sequence[Path]) -> None:
    """Look `name` up in the YAML files that lm-eval would index, without importing lm-eval.

    Where lm-eval is not installed next to vexport, the worker's lm-eval is left to judge.
    """
    package = find_spec("lm_eval")
    if package is None or package.submodule_search_locations is None:
        return
    roots = [*include_paths, *(Path(location) / "tasks" for location in package.submodule_search_locations)]
    names: set[str] = set()
    for file in (file for root in roots for file in root.rglob("*.yaml")):
        names |= _indexed(file.read_bytes())
        if name in names:
            return
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "list them with `lm-eval ls tasks`"
    raise InputError(f"task {name}", got="an unknown name", need="a task of lm-eval or a YAML file", fix=hint)


def _require_no_python(name: str, folders: Sequence[Path]) -> None:
    """InputError where a task of these folders, or a file that it names, would run its own Python."""
    texts = {file: file.read_bytes() for folder in folders for file in sorted(folder.rglob("*.yaml"))}
    defined = {file: {one.decode() for one, _ in _INDEXED.findall(text)} for file, text in texts.items()}
    pending = {file for file in texts if name in defined[file]}
    pending = pending or {file for file in texts if name in _indexed(texts[file])}  # a tag in a list
    reached = set[Path]()
    while pending:
        reached |= pending
        words = {word for file in pending for word in (*_indexed(texts[file]), *_included(texts[file]))}
        pending = {file for file in texts if words & {*defined[file], file.name}} - reached
    for file in sorted(reached):
        if b"!function" in texts[file]:
            got, need = "!function, Python that would be run", "a task without Python"
            raise InputError(str(file), got=got, need=need, fix=_fix(got))


def _indexed(text: bytes) -> set[str]:
    """Tasks, groups and tags that a YAML file defines or lists."""
    return {(one or other).decode() for one, other in _INDEXED.findall(text)}


def _included(text: bytes) -> set[str]:
    """The names of the files that a YAML file includes."""
    return {Path(name.decode()).name for name in _INCLUDED.findall(text)}
