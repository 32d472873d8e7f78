"""Convert the user's tasks to tasks that lm-eval can run from any folder.

A task is the name of a task in lm-eval, or a YAML file with a task or a group of tasks. YAML files
are read here without running any code. Includes are merged, and paths of data files are made
absolute. The result is written into the run's folder.
"""

import difflib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import yaml

from vexport.config_files import MOST_BYTES, MOST_VALUES, BoundedLoader, load_yaml
from vexport.errors import InputError, nearest_hint, raise_all
from vexport.errors.extras import attempt_all
from vexport.files import write_text
from vexport.inference.options import NO_EVALUATION
from vexport.inference.shipped import (
    NAMES,
    read_part,
    shipped_parts,
    shipped_task,
    takes_pictures,
)
from vexport.inference.shipped.base import ShippedPart
from vexport.outputs.manifest import record
from vexport.outputs.replaceable import resolved
from vexport.rules import file as file_rules
from vexport.rules import tasks as rules
from vexport.scenario import Evaluate

Config = dict[str, object]
# Matches the names of tasks, groups and tags that a YAML file defines or lists.
_INDEXED_NAME = re.compile(
    rb"^[ \t-]*(?:task|group|tag)[ \t]*:[ \t]*[\"']?([\w.+-]+)|^[ \t]*-[ \t]*[\"']?([\w.+-]+)", re.M
)
REQUIRED_KEYS = ("task", "dataset_path")
GROUP_KEYS = ("group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag")
GROUP_SUFFIX = ".group.yaml"
"""Suffix of the file of a resolved group.

lm-eval 0.4.13 does not accept the path of a group's file. It needs the group's folder and name.
"""
FILE_FORMATS = {
    "json",
    "csv",
    "parquet",
    "arrow",
    "text",
    "xml",
    "webdataset",
    "hdf5",
    "imagefolder",
}
"""Values of `dataset_path` for documents in `data_files` or `data_dir`.

Source: datasets/packaged_modules.
"""
MOST_INCLUDES = 50
"""Maximum number of includes of a task's file, directly or through other files."""
PICKLED = "pandas"
"""Value of `dataset_path` for pickled files.

Older versions of datasets unpickle them, and unpickling can run code.
"""
EVALUATION_SPLITS = ("test_split", "validation_split")
METRICS = {
    "loglikelihood": ("acc", "perplexity"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": (
        "acc",
        "acc_norm",
        "acc_bytes",
        "acc_mutual_info",
        "exact_match",
        "f1",
        "mcc",
    )
    + ("brier_score", "likelihood"),
}
"""All metrics of tasks by output type (`process_results` in lm_eval/api/task.py).

Tasks that generate text are not listed: they have more metrics.
"""
DEFAULT_METRICS: Mapping[str, tuple[str, ...]] = {
    "generate_until": ("exact_match",),
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm"),
}
"""Metrics of tasks without a `metric_list`, by output type (lm_eval/api/registry.py)."""
DEFAULT_OUTPUT_TYPE = "generate_until"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMetrics:
    """Metrics that are known before a model runs, of a task or of a group that lm-eval aggregates.

    `metrics` maps each metric to the name of its aggregation, or to "" if the metric's default
    aggregation applies. For a group, it has the metrics that all tasks of the group share.
    `has_code` is True if Python code computes the metrics. Then the task may have further metrics.
    """

    name: str
    metrics: Mapping[str, str]
    has_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """A task or a group of tasks from a YAML file.

    `config` has the file's keys, with includes merged and a group's tasks inlined.
    """

    config: Config

    @property
    def name(self) -> str:
        """Return the name of the task or group."""
        return str(self.config["group" if self._is_group else "task"])

    @property
    def _is_group(self) -> bool:
        return isinstance(self.config.get("task"), list)

    @property
    def _tasks(self) -> list[Config]:
        """Return the keys of the task, or the keys of each task in the group."""
        members = self.config["task"] if self._is_group else [{}]
        assert isinstance(members, list)
        return [{**self.config, **member} for member in members if isinstance(member, dict)]

    @property
    def reads_hub(self) -> bool:
        """Return True if a task has documents outside this machine."""
        return not all(
            is_local_dataset(str(config.get("dataset_path")), config.get("dataset_kwargs"))
            for config in self._tasks
        )

    @property
    def has_other_metrics(self) -> bool:
        """Return True if generated text is scored by a metric that lm-eval may lack."""
        return any(
            metric != "exact_match"
            for config in self._tasks
            if "process_results" not in config and config.get("output_type") not in METRICS
            for metric in _listed_metrics(config)
        )

    @property
    def metrics(self) -> list[TaskMetrics]:
        """Return the metrics of the task, the group, or the group's tasks.

        A group counts as one task if lm-eval aggregates it.
        """
        tasks = [_task_metrics(config) for config in self._tasks]
        if not self._is_group:
            return tasks
        if self.config.get("aggregate_metric_list"):
            return [group_metrics(self.name, tasks)]
        return [replace(task, name=f"{self.name}::{task.name}") for task in tasks]

    def write(self, folder: Path) -> str:
        """Write `folder`/NAME/NAME.yaml and the modules next to it, and return the file's path."""
        target = folder / self.name / f"{self.name}{GROUP_SUFFIX if self._is_group else '.yaml'}"
        target.parent.mkdir(parents=True, exist_ok=True)
        for module in named_modules(self.config):
            record(target.parent / module.name)
            shutil.copy2(module, target.parent / module.name)
        record(target)
        text = yaml.dump(self.config, Dumper=TaskDumper, allow_unicode=True, sort_keys=False)
        write_text(target, text)
        return str(target)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTasks:
    """Tasks that can be passed to lm-eval, in the user's order.

    They are files, parts of shipped tasks, and names as text. Only lm-eval knows the keys of a task
    that is given by name.
    """

    tasks: tuple[TaskFile | ShippedPart | str, ...]

    @property
    def files(self) -> list[TaskFile]:
        """Return the tasks and groups from YAML files."""
        return [task for task in self.tasks if isinstance(task, TaskFile)]

    @property
    def exact_names(self) -> list[str]:
        """Return the names that are certainly tasks or groups, and not tags of lm-eval."""
        return [task.name for task in self.tasks if not isinstance(task, str)]

    @property
    def names(self) -> list[str]:
        """Return the names of the tasks and groups."""
        return [task if isinstance(task, str) else task.name for task in self.tasks]

    @property
    def metrics(self) -> list[TaskMetrics]:
        """Return the metrics of all tasks, or nothing if a task is given by name."""
        if any(isinstance(task, str) for task in self.tasks):
            return []
        return [
            metrics
            for task in self.tasks
            if not isinstance(task, str)
            for metrics in (task.metrics if isinstance(task, TaskFile) else [_part_metrics(task)])
        ]

    def write(self, folder: Path) -> tuple[str, ...]:
        """Return the names and YAML files to pass to lm-eval. The files are below `folder`."""
        root = folder.resolve()
        return tuple(task if isinstance(task, str) else task.write(root) for task in self.tasks)


def read_tasks(
    tasks: Sequence[str],
    *,
    include_paths: Sequence[Path] = (),
    trust_remote_code: bool = False,
    settings: Evaluate = NO_EVALUATION,
) -> PreparedTasks:
    """Read and check the tasks of the user. `settings` are settings of shipped tasks.

    Raises:
        InputError: a file is missing or broken, lacks a key or its data, or has a `!function` tag
            without `trust_remote_code`. A name is not a task of lm-eval, is given twice, or is the
            name of a shipped task. The error lists the problems of all tasks.
    """
    raise_all([*_shipped_names(include_paths)])
    read = attempt_all(
        (task, partial(_read, task, include_paths, trust_remote_code, settings)) for task in tasks
    )
    named = [(given, task) for given, found in zip(tasks, read, strict=True) for task in found]
    prepared = PreparedTasks(tasks=tuple(task for _, task in named))
    names = prepared.names
    raise_all(
        [
            InputError.of(rules.TWICE, f"task {given}", name=name)
            for number, ((given, _), name) in enumerate(zip(named, names, strict=True))
            if name in names[:number]
        ]
    )
    return prepared


def _shipped_names(include_paths: Sequence[Path]) -> Iterator[InputError]:
    """Yield an error for each file that defines a task with the name of a shipped task."""
    for root in include_paths:
        for file in filter(_is_readable, sorted(root.rglob("*.yaml"))):
            defined = {key.decode() for key, _ in _INDEXED_NAME.findall(file.read_bytes()) if key}
            for name in sorted(defined & NAMES):
                yield InputError.of(rules.SHIPPED_NAME, str(file), name=name)


def _part_metrics(part: ShippedPart) -> TaskMetrics:
    task = shipped_task(part.name)
    assert task is not None
    return TaskMetrics(name=part.name, metrics=dict.fromkeys(task.metrics, "mean"))


def _read(
    task: str, include_paths: Sequence[Path], trust: bool, settings: Evaluate
) -> Sequence[TaskFile | ShippedPart | str]:
    if parts := shipped_parts(task, settings):
        return parts
    path = Path(task)
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        require_known(task, include_paths)
        return [task]
    config = read_task(path, trust)
    if config.get("task") and isinstance(config["task"], list):
        config = _inlined(path, config, trust)
    else:
        _require_complete(path, config, trust)
    file = TaskFile(config=config)
    for name in sorted(NAMES.intersection([file.name, *(one.name for one in file.metrics)])):
        raise InputError.of(rules.SHIPPED_NAME, str(path), name=name)
    return [file]


def _inlined(path: Path, config: Config, trust: bool) -> Config:
    """Return a group's keys with the keys of its tasks inlined. lm-eval accepts this form."""
    _require_name(path, config, "group")
    given = config["task"]
    assert isinstance(given, list)
    shared = {key: value for key, value in config.items() if key not in GROUP_KEYS}
    members: list[Config] = []
    values = 0
    for member in given:
        members.append(_member(path, member, trust))
        values += sum(1 for _ in leaves(members[-1]))
        if values > MOST_VALUES:
            what = "values in a group"
            raise InputError.of(rules.TOO_LARGE, f"{path}: task", most=MOST_VALUES, what=what)
    for member in members:
        _require_complete(path, shared | member, trust)
    return config | {"task": members}


def _member(path: Path, member: object, trust: bool) -> Config:
    """Return the keys of a group's task, from the group's YAML file or from a file next to it."""
    if isinstance(member, dict):
        return with_absolute_paths(
            {str(key): value for key, value in member.items()}, path.parent.resolve()
        )
    name = str(member)
    if not name.endswith((".yaml", ".yml")):
        name += ".yaml"
    return read_task(path.parent / name, trust)


def _require_name(path: Path, config: Config, key: str) -> None:
    """Raise InputError if the name of a task or a group cannot be the name of a file."""
    name = config.get(key)
    if not isinstance(name, str) or Path(name).name != name:
        raise InputError.of(rules.NAME, f"{path}: {key}", name=name)


def _require_complete(path: Path, config: Config, trust: bool) -> None:
    where = str(path)
    missing = [key for key in REQUIRED_KEYS if not isinstance(config.get(key), str)]
    if not any(config.get(key) for key in EVALUATION_SPLITS):
        missing.append(" or ".join(EVALUATION_SPLITS))
    if config.get("output_type") != "loglikelihood_rolling" and "doc_to_target" not in config:
        missing.append("doc_to_target")
    problems = [InputError.of(rules.KEY, where, key=key) for key in missing]
    kwargs = config.get("dataset_kwargs")
    files = _texts(kwargs.get("data_files") if isinstance(kwargs, dict) else None)
    problems += [
        InputError.of(rules.NO_FILE, where, file=file)
        for file in dict.fromkeys(files)
        if "://" not in file and not _matching(Path(file))
    ]
    if config.get("dataset_path") == PICKLED:
        problems.append(InputError.of(rules.PICKLED, f"{path}: dataset_path"))
    problems += [
        InputError.of(rules.CODE, f"{path}: metric", name=metric)
        for metric in _listed_metrics(config)
        if not trust and is_foreign_code(metric)
    ]
    raise_all(problems or [*_unknown_metrics(path, config)])
    _require_name(path, config, "task")


def _listed_metrics(config: Config) -> Iterator[str]:
    listed = config.get("metric_list")
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and isinstance(metric := entry.get("metric"), str):
            yield metric


def _unknown_metrics(path: Path, config: Config) -> Iterator[InputError]:
    """Yield an error for each metric that lm-eval would silently skip."""
    output_type = str(config.get("output_type"))
    known = METRICS.get(output_type, ())
    for metric in _listed_metrics(config) if known and "process_results" not in config else ():
        if metric not in known:
            yield InputError.of(
                rules.METRIC,
                f"{path}: metric",
                metric=metric,
                known=known,
                output_type=output_type,
                hint=nearest_hint(metric, known),
            )


def reads_hub(spec: str) -> bool:
    """Return True if a task that is passed to lm-eval has documents outside this machine."""
    if read_part(spec) is not None:
        return False
    path = Path(spec)
    return not path.is_file() or TaskFile(config=parse_task(path, trust=True)).reads_hub


def group_metrics(group: str, tasks: Sequence[TaskMetrics]) -> TaskMetrics:
    """Return a group with the metrics that all its tasks share."""
    first, *others = tasks
    shared = {
        metric: aggregation
        for metric, aggregation in first.metrics.items()
        if all(task.metrics.get(metric) == aggregation for task in others)
    }
    has_code = any(task.has_code for task in tasks)
    return TaskMetrics(name=group, metrics=shared, has_code=has_code)


def _task_metrics(config: Config) -> TaskMetrics:
    output_type = str(config.get("output_type", DEFAULT_OUTPUT_TYPE))
    listed = config.get("metric_list")
    entries = listed if isinstance(listed, list) else []
    metrics = dict.fromkeys(DEFAULT_METRICS.get(output_type, ()), "")
    if listed is not None:
        metrics = {
            str(entry.get("metric")): str(entry.get("aggregation") or "")
            for entry in entries
            if isinstance(entry, dict)
        }
    has_code = "process_results" in config or "class" in config
    return TaskMetrics(name=str(config.get("task")), metrics=metrics, has_code=has_code)


def is_local_dataset(dataset: str, kwargs: object) -> bool:
    """Return True if `datasets` finds a task's documents without the network."""
    if not isinstance(kwargs, dict):
        return Path(dataset).is_dir()
    urls = any(
        "://" in value for value in _texts([kwargs.get("data_files"), kwargs.get("data_dir")])
    )
    return not urls and (Path(dataset).is_dir() or dataset in FILE_FORMATS)


def _texts(value: object) -> Iterator[str]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, str))


def is_foreign_code(metric: str) -> bool:
    """Return True if `evaluate.load` would import a local file, or code from a hub account.

    A plain name is a metric of lm-eval or of the hub account of `evaluate`, unless the current
    folder has a folder with the metric's code. See evaluate/loading.py.
    """
    return "/" in metric or metric.endswith(".py") or Path(metric, f"{metric}.py").is_file()


@dataclass(frozen=True, slots=True)
class _Function:
    """A `!function module.name` tag: Python that lm-eval would import from a file in `folder`."""

    name: str
    folder: Path
    line: int


class _Loader(BoundedLoader):
    """YAML loader that runs no Python. A `!function` tag becomes a `_Function`."""


class TaskDumper(yaml.SafeDumper):
    """YAML dumper that writes each `_Function` as a `!function` tag."""


def _function(loader: BoundedLoader, node: yaml.Node) -> _Function:
    return _Function(str(node.value), Path(loader.name).parent, node.start_mark.line + 1)


_Loader.add_constructor("!function", _function)  # type: ignore[type-var]
TaskDumper.add_representer(
    _Function, lambda dumper, tag: dumper.represent_scalar("!function", tag.name)
)


def read_task(path: Path, trust: bool) -> Config:
    """Return the keys of a task's file and of its includes.

    The file's keys override the keys of its includes. Paths of data become absolute. Raises
    InputError for more than `MOST_INCLUDES` includes, and so for a file that includes itself.
    """
    return _TaskFiles(trust=trust).read(path)


@dataclass(slots=True)
class _TaskFiles:
    """Parsed files of one task, and the number of includes so far. Each file is parsed once."""

    trust: bool
    parsed: dict[Path, Config] = field(default_factory=dict)
    includes: int = 0

    def read(self, path: Path) -> Config:
        """Return the keys of a file and its includes; see `read_task`."""
        file = resolved(path)
        if file not in self.parsed:
            config = parse_task(path, self.trust)
            includes = config.pop("include", [])
            merged: Config = {}
            for include in includes if isinstance(includes, list) else [includes]:
                self._count(path)
                merged |= self.read(path.parent / str(include))
            self.parsed[file] = merged | with_absolute_paths(config, file.parent)
        return self.parsed[file]

    def _count(self, path: Path) -> None:
        self.includes += 1
        if self.includes > MOST_INCLUDES:
            where = f"{path}: include"
            raise InputError.of(rules.TOO_LARGE, where, most=MOST_INCLUDES, what="includes")


def task_files(path: Path) -> list[Path]:
    """Return a task's input files: its YAML, includes, tasks of a group, documents and code.

    A folder of documents is returned with all files in it. A file that cannot be parsed is returned
    without its includes.
    """
    found: dict[Path, None] = {}
    waiting = [path]
    while waiting and len(found) <= MOST_INCLUDES:
        file = waiting.pop()
        if file in found or not file.is_file():
            continue
        found[file] = None
        try:
            config = parse_task(file, trust=True)
        except InputError:
            continue
        members = config.get("task")
        named = [config.get("include"), members if isinstance(members, list) else None]
        for name in _texts(named):
            waiting += [file.parent / name, file.parent / f"{name}.yaml"]
        for kwargs in values_of_key(config, "data_files"):
            for text in _texts(kwargs):
                found |= dict.fromkeys(_matching(_data_file(file.parent, text)))
        for folder in _folders_of_documents(config, file.parent):
            inside = (each for each in sorted(folder.rglob("*")) if each.is_file())
            found |= dict.fromkeys(inside)
        found |= dict.fromkeys(named_modules(config))
    return list(found)


def _folders_of_documents(config: Config, base: Path) -> Iterator[Path]:
    absolute = with_absolute_paths(config, base)
    given = [absolute.get("dataset_path"), *values_of_key(absolute, "data_dir")]
    return (Path(folder) for folder in _texts(given) if Path(folder).is_absolute())


def values_of_key(value: object, key: str) -> Iterator[object]:
    """Yield the values of a key at any level of mappings and lists."""
    if isinstance(value, Mapping):
        if key in value:
            yield value[key]
        value = list(value.values())
    if isinstance(value, list):
        for member in value:
            yield from values_of_key(member, key)


def _matching(pattern: Path) -> list[Path]:
    """Return the files that match a path with `*` in its name."""
    try:
        return [file for file in pattern.parent.glob(pattern.name) if file.is_file()]
    except (ValueError, OSError):
        return []


def _data_file(folder: Path, name: str) -> Path:
    """Return the path of a file of documents that a YAML file in `folder` names.

    The name is tried relative to `folder`, then relative to the current folder as in lm-eval, and
    last as a file name in `folder`. If no such file exists, the path relative to `folder` is
    returned.
    """
    for path in (folder / name, Path.cwd() / name, folder / Path(name).name):
        if _matching(path):
            return path
    return folder / name


def task_folders(name: str, include_paths: Sequence[Path]) -> list[Path]:
    """Return the folders of the YAML files below `include_paths` that define or list a task."""
    folders: dict[Path, None] = {}
    for root in include_paths:
        for file in filter(_is_readable, sorted(root.rglob("*.yaml"))):
            found = _INDEXED_NAME.findall(file.read_bytes())
            if name.encode() in {key or other for key, other in found}:
                folders[file.parent] = None
    return [*folders]


def parse_task(path: Path, trust: bool) -> Config:
    """Return the keys in a file, without the keys of its includes.

    Raises InputError if the file is not a YAML mapping, or has `!function` without `trust`.
    """
    config = load_yaml(path, "the YAML of a task", _Loader)
    for function in () if trust else _functions(config):
        raise InputError.of(
            rules.CODE, f"{path}:{function.line}", name=f"!function {function.name}"
        )
    if not isinstance(config, dict):
        kind = f"a {type(config).__name__}"
        need = "a mapping with the keys of a task"
        raise InputError.of(file_rules.JSON_OBJECT, str(path), kind=kind, need=need)
    return {str(key): value for key, value in config.items()}


def with_absolute_paths(config: Config, base: Path) -> Config:
    """Make `data_files`, `data_dir` and a dataset folder absolute. Keep URLs."""

    def absolute(value: object, key: str) -> object:
        if isinstance(value, dict):
            return {name: absolute(member, key) for name, member in value.items()}
        if isinstance(value, list):
            return [absolute(member, key) for member in value]
        if not isinstance(value, str) or "://" in value:
            return value
        if key == "data_files":
            return str(_data_file(base, value))
        is_in_base = (base / value).is_dir() or not Path(value).is_dir()
        return str(base / value if is_in_base else Path.cwd() / value)

    absolute_config = dict(config)
    if isinstance(kwargs := config.get("dataset_kwargs"), dict):
        keys = [key for key in ("data_files", "data_dir") if key in kwargs]
        local = {key: absolute(kwargs[key], key) for key in keys}
        absolute_config["dataset_kwargs"] = kwargs | local
    dataset = config.get("dataset_path")
    if isinstance(dataset, str) and dataset.startswith(("./", "../")):
        absolute_config["dataset_path"] = str((base / dataset).resolve())
    return absolute_config


def leaves(value: object) -> Iterator[object]:
    """Yield the values in nested mappings and lists."""
    if isinstance(value, (Mapping, list)):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(member)
    else:
        yield value


def _functions(value: object) -> Iterator[_Function]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, _Function))


def pictured_task(specs: Sequence[str]) -> str:
    """Return the name of the first task with pictures among tasks that were written, or "".

    Only lm-eval knows the keys of a task that is given by name.
    """
    if name := takes_pictures(specs):
        return name
    for file in (Path(spec) for spec in specs if spec.endswith(".yaml")):
        config = parse_task(file, trust=True)
        if any(values_of_key(config, "doc_to_image")):
            return TaskFile(config=config).name
    return ""


def named_modules(config: Config) -> Iterator[Path]:
    """Return the Python files of `!function` tags, if they are next to the YAML file."""
    files = (tag.folder / f"{tag.name.rpartition('.')[0]}.py" for tag in _functions(config))
    return (file for file in files if file.is_file())


def require_known(name: str, include_paths: Sequence[Path]) -> None:
    """Raise InputError if `name` is not in the YAML files that lm-eval indexes.

    This does not import lm-eval. If lm-eval is not installed in vexport's environment, the worker
    checks the name.
    """
    package = find_spec("lm_eval")
    if package is None or package.submodule_search_locations is None:
        return
    roots = [
        *include_paths,
        *(Path(location) / "tasks" for location in package.submodule_search_locations),
    ]
    names: set[str] = set()
    for file in (file for root in roots for file in root.rglob("*.yaml") if _is_readable(file)):
        names |= {
            (key or other).decode() for key, other in _INDEXED_NAME.findall(file.read_bytes())
        }
        if name in names:
            return
    close = difflib.get_close_matches(name, names, n=3)
    remedy = f"did you mean {' or '.join(close)}?" if close else "list them with `lm-eval ls tasks`"
    raise InputError.of(rules.NO_SUCH_TASK, f"task {name}", remedy=remedy)


def _is_readable(file: Path) -> bool:
    """Return whether a path is a file that is small enough for a task."""
    return file.is_file() and file.stat().st_size <= MOST_BYTES
