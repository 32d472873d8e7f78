"""Load lm-eval's tasks as data, and download their documents before any engine starts.

A task may need documents, packages, or metrics from the hub. If one of these is missing, an error
names the remedy.

`python -m vexport.inference.task_data REQUEST.json RESULT.json` is the worker that downloads. It
imports lm-eval and datasets, but not vLLM.
"""

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from vexport.checkpoint.hub import (
    downloaded,
    is_hub_error,
    is_network_error,
    translate_error,
)
from vexport.engine.messages import InputProblem, SessionRequest
from vexport.engine.session import Worker, raise_found_problems
from vexport.engine.worker import input_problem, progress_reporter, run_worker
from vexport.errors import EnvironmentFault, InputError, VexportError
from vexport.inference.decoding import bounded_pictures
from vexport.inference.model import override_attribute
from vexport.inference.shipped import read_part
from vexport.inference.shipped.lm_eval_task import lm_eval_task
from vexport.inference.tasks import (
    FILE_FORMATS,
    GROUP_SUFFIX,
    TaskMetrics,
    group_metrics,
    is_foreign_code,
    is_local_dataset,
    task_folders,
)
from vexport.names import HubName
from vexport.records import PROGRESS_DETAIL, OnProgress
from vexport.records.patterns import TEMPLATE_SECONDS, time_limit
from vexport.rules import environment
from vexport.rules import tasks as rules

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import ConfigurableTask, Task
    from lm_eval.tasks import TaskManager

STAGE = "task data"
UNKNOWN_AGGREGATION = "a Python function"
"""Name of an aggregation that is not in lm-eval's registry."""
# Matches the message of the package `evaluate` for a metric that is neither on the hub nor in the
# cache (evaluate/loading.py).
_METRIC = re.compile(r"Module '(?P<name>[\w/.-]+)' doesn't exist on the Hugging Face Hub either")
_EXTRA = re.compile(r"^(?P<package>[\w.-]+).*extra == ['\"](?P<extra>[\w.-]+)['\"]")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedTasks:
    """Metrics of the tasks whose documents were downloaded, and the problems with other tasks."""

    tasks: tuple[TaskMetrics, ...]
    problems: tuple[InputProblem, ...]


def fetch_task_data(
    request: SessionRequest,
    *,
    log: Path,
    timeout: float,
    vllm_python: Path | None,
    on_progress: OnProgress,
) -> tuple[TaskMetrics, ...]:
    """Download the documents of `request.tasks` into the cache of the lm-eval that will read them.

    Returns the metrics of the tasks.

    Raises:
        InputError: a task, its dataset or its metric is wrong.
        EnvironmentFault: the network, a token, the disk or an offline variable prevents a download.
    """
    worker = Worker(
        module="vexport.inference.task_data",
        request=request,
        kind=FetchedTasks,
        where=STAGE,
        log=log,
        timeout=timeout,
        vllm_python=vllm_python,
    )
    fetched = worker.run(on_progress)
    raise_found_problems(fetched.problems)
    return fetched.tasks


class _Bounded(jinja2.Template):
    """A template with a time limit."""

    def render(self, *args: object, **kwargs: object) -> str:
        """Render as jinja2 does; raise TemplateRuntimeError if it takes too long."""
        try:
            with time_limit(TEMPLATE_SECONDS):
                return super().render(*args, **kwargs)
        except TimeoutError as error:
            raise jinja2.TemplateRuntimeError(f"a template that is {error}") from None


class _Sandbox(SandboxedEnvironment):
    template_class = _Bounded


@contextmanager
def tasks_as_data() -> Iterator[None]:
    """Inside the block, run no code from a task's YAML, except templates in a sandbox.

    Without the sandbox, a template could run any Python code. Loading a task raises InputError for
    a `!function` in a file outside lm-eval.
    """
    from lm_eval import tasks, utils
    from lm_eval.tasks import _yaml_loader

    own = Path(tasks.__file__).resolve().parent
    imported = _yaml_loader._import_func_in_yml

    def import_own(name: str, folder: Path) -> object:
        if not folder.is_relative_to(own):
            raise InputError.of(rules.CODE, str(folder), name=f"!function {name}")
        return imported(name, folder)

    sandbox = _Sandbox(
        loader=utils.env.loader, undefined=utils.env.undefined, keep_trailing_newline=True
    )
    sandbox.filters |= utils.env.filters
    with (
        override_attribute(utils, "env", sandbox),
        override_attribute(_yaml_loader, "_import_func_in_yml", import_own),
    ):
        yield


def task_manager(request: SessionRequest) -> "TaskManager":
    """Return lm-eval's index of tasks.

    lm-eval's 14,000 task files are read only if a task is given by name.
    """
    from lm_eval.tasks import TaskManager

    folders = [Path(task).parent for task in request.tasks if task.endswith(GROUP_SUFFIX)]
    return TaskManager(
        include_path=[str(path) for path in (*request.include_paths, *folders)],
        include_defaults=not all(Path(task).is_file() for task in request.tasks),
    )


def load_tasks(
    request: SessionRequest, manager: "TaskManager", names: Sequence[str]
) -> list["Task | Group"]:
    """Load the tasks and the outermost groups. lm-eval aggregates scores over groups.

    Raises:
        InputError: a task cannot be loaded, or runs Python code without trust.
        EnvironmentFault: a package or a metric is missing.
    """
    tasks: list[Task | Group] = []
    trust = request.trust_remote_code
    if trust:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # `evaluate` requires it
    for task in names:
        if (part := read_part(task)) is not None:
            tasks.append(lm_eval_task(part))
            continue
        if _settings(task, manager).get("unsafe_code") and not trust:
            raise InputError.of(rules.MODEL_CODE, f"task {task}")
        name = Path(task).name.removesuffix(GROUP_SUFFIX) if task.endswith(GROUP_SUFFIX) else task
        try:
            with _known_metrics(Path(name).stem, trust=trust):
                loaded = manager.load([name])
        except VexportError:
            raise
        except Exception as error:
            if (fault := missing_requirement(error, task)) is not None:
                raise fault from error
            reason = f"{type(error).__name__}: {error}"
            raise InputError.of(rules.LOAD, f"task {task}", reason=reason) from error
        inner = {child for children in loaded["group_map"].values() for child in children}
        outer = [group for name, group in loaded["groups"].items() if name not in inner]
        grouped = {member.task_name for group in outer for member in group.get_all_tasks()}
        tasks += [*outer, *(each for name, each in loaded["tasks"].items() if name not in grouped)]
    return tasks


def _settings(name: str, manager: "TaskManager") -> Mapping[str, object]:
    """Return the YAML keys of a task in lm-eval's index, or an empty mapping for a file."""
    entry = manager.task_index.get(name)
    return (entry.cfg or {}) if entry is not None else {}


@contextmanager
def _known_metrics(task_name: str, *, trust: bool) -> Iterator[None]:
    """Inside the block, loading a task raises InputError if a metric is missing or not trusted.

    A metric from outside lm-eval is code. Without this check, lm-eval would fail only when it
    computes the score.
    """
    from lm_eval.api import task

    known = task.get_metric

    def get_metric(metric: str, hf_evaluate_metric: bool = False) -> object:
        where = f"task {task_name}: metric {metric}"
        if not trust and is_foreign_code(metric):
            raise InputError.of(rules.CODE, where, name=metric)
        if (found := known(metric, hf_evaluate_metric)) is None:
            raise InputError.of(rules.NO_METRIC, where, metric=metric)
        return found

    with override_attribute(task, "get_metric", get_metric):
        yield


def missing_requirement(error: Exception, task: str) -> EnvironmentFault | None:
    """Return an error that names the missing package or metric of a task that failed to load.

    Returns None if `error` has another cause.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        return _missing_module(f"task {task}", module, _requirement(module))
    metric = _METRIC.search(str(error)) if isinstance(error, FileNotFoundError) else None
    if metric is None:
        return None
    where = f"task {task}: metric {metric['name']}"
    return EnvironmentFault.of(rules.NO_METRIC, where, metric=metric["name"])


def _missing_module(where: str, module: str, requirement: str) -> EnvironmentFault:
    return EnvironmentFault.of(
        environment.MODULE,
        where,
        module=module,
        requirement=requirement,
        interpreter=sys.executable,
    )


def _requirement(module: str) -> str:
    """Return the requirement that installs a module.

    Return lm-eval's extra if an extra installs the module (`'lm-eval[ifeval]'`), else the module's
    name.
    """
    for line in importlib.metadata.requires("lm_eval") or ():
        named = _EXTRA.match(line)
        if named and named["package"].replace("-", "_") == module:
            return f"'lm-eval[{named['extra']}]'"
    return module


@contextmanager
def explained_downloads(
    on_progress: OnProgress,
    done: int,
    total: int,
    folders: Sequence[Path] = (),
    *,
    thinks: bool = False,
) -> Iterator[None]:
    """Inside the block, report lm-eval's downloads, and convert faults of the hub to VexportErrors.

    Local files are also searched for in the tasks' `folders`, at any depth. If the model `thinks`,
    tasks that score given texts raise InputError before they download their documents.
    """
    from lm_eval.api.task import ConfigurableTask

    original = ConfigurableTask.download

    def download(self: "ConfigurableTask", dataset_kwargs: dict[str, object] | None = None) -> None:
        if thinks and self.OUTPUT_TYPE != "generate_until":
            where = f"task {self.config.task}"
            raise InputError.of(rules.THINKING, where, kind=str(self.OUTPUT_TYPE))
        dataset = str(self.DATASET_PATH)
        kwargs = dataset_kwargs or {}
        on_progress(f"{STAGE}{PROGRESS_DETAIL}{dataset}", done, total)
        is_local = is_local_dataset(dataset, dataset_kwargs)
        if kwargs and dataset in FILE_FORMATS and is_local:
            files = found_documents(kwargs.get("data_files"), str(self.config.task), folders)
            dataset_kwargs = {**kwargs, "data_files": files}
        try:
            original(self, dataset_kwargs)
        except Exception as error:
            if is_local:
                raise
            revision = kwargs.get("revision")
            name = HubName(id=dataset, revision=str(revision) if revision else None)
            if is_network_error(error) and (copy := downloaded(name)) is not None:
                # Without a network, `datasets` finds only data that it has loaded before. It does
                # not find files from `hf download`.
                with override_attribute(self, "DATASET_PATH", copy):
                    original(
                        self, {key: value for key, value in kwargs.items() if key != "revision"}
                    )
                return
            if is_hub_error(error):
                raise translate_error(error, name, "dataset") from error
            raise

    with override_attribute(ConfigurableTask, "download", download):
        yield


def found_documents(value: object, task: str, folders: Sequence[Path]) -> object:
    """Return the paths of local document files.

    A file is searched for in the current folder, then next to the task's YAML file, and last at any
    depth in the tasks' folders. Raises InputError for a file that is not found, or found more than
    once.
    """
    if isinstance(value, dict):
        return {name: found_documents(each, task, folders) for name, each in value.items()}
    if isinstance(value, list):
        return [found_documents(each, task, folders) for each in value]
    if not isinstance(value, str) or "*" in value or Path(value).exists():
        return value
    files = _candidates(value, task, folders)
    where = f"task {task}: data_files"
    if not files:
        raise InputError.of(rules.NO_FILE, where, file=value)
    if len(files) > 1:
        count = len(files)
        raise InputError.of(rules.SEVERAL_FILES, where, count=count, file=value, files=files)
    return str(files[0])


def _candidates(value: str, task: str, folders: Sequence[Path]) -> list[Path]:
    """Return the files in the tasks' folders that a path of documents may refer to."""
    path = Path(value)
    if path.is_absolute():
        return []
    for folder in task_folders(task, folders):
        for file in (folder / path, folder / path.name):
            if file.is_file():
                return [file]
    if ".." in path.parts:
        return []
    return sorted({file for folder in folders for file in folder.rglob(str(path))})


def _fetched(request: SessionRequest) -> FetchedTasks:
    """Download the tasks' data. Return the tasks' metrics, and the problems without duplicates."""
    problems: dict[InputProblem, None] = {}
    tasks: list[TaskMetrics] = []
    try:
        for found in _fetch(request, progress_reporter()):
            if isinstance(found, VexportError):
                problems[input_problem(found)] = None
            else:
                tasks.append(found)
    except VexportError as error:
        problems[input_problem(error)] = None
    return FetchedTasks(tasks=tuple(tasks), problems=tuple(problems))


def _fetch(request: SessionRequest, report: OnProgress) -> Iterator[VexportError | TaskMetrics]:
    """Build every task once to download its documents. Yield the errors and the tasks' metrics."""
    if importlib.util.find_spec("lm_eval") is None:
        raise _missing_module("tasks", "lm_eval", "lm-eval")
    total = len(request.tasks)
    folders = request.include_paths
    report(STAGE, 0, total)
    manager = task_manager(request)
    for number, task in enumerate(request.tasks):
        sandbox = nullcontext() if request.trust_remote_code else tasks_as_data()
        thinks = bool(request.lm_eval.enable_thinking)
        try:
            with (
                explained_downloads(report, number, total, folders, thinks=thinks),
                bounded_pictures({}),
                sandbox,
            ):
                loaded = load_tasks(request, manager, [task])
            yield from loaded_metrics(loaded)
        except VexportError as error:
            yield error
            if error.rule != rules.THINKING.id:
                yield from _data_problem(task, _settings(task, manager), report, folders)
    report(STAGE, total, total)


def loaded_metrics(loaded: "list[Task | Group]") -> Iterator[TaskMetrics]:
    """Yield the metrics of loaded tasks, and of the outermost groups that lm-eval aggregates."""
    for entry in loaded:
        if not hasattr(entry, "get_all_tasks"):
            yield _metrics_of_task(entry)
        elif entry.aggregate_metric_list:
            yield group_metrics(
                entry.name, [_metrics_of_task(task) for task in entry.get_all_tasks()]
            )
        else:
            yield from loaded_metrics(list(entry))


def _metrics_of_task(task: "Task") -> TaskMetrics:
    """Return the metrics of a loaded task, by lm-eval's own registry of aggregations."""
    from lm_eval.api.registry import AGGREGATION_REGISTRY
    from lm_eval.api.task import ConfigurableTask

    names = {function: name for name, function in AGGREGATION_REGISTRY.items()}
    metrics = {
        metric: names.get(function, UNKNOWN_AGGREGATION)
        for metric, function in task.aggregation().items()
    }
    is_own_class = type(task) is not ConfigurableTask
    has_code = is_own_class or task.config.process_results is not None
    return TaskMetrics(name=str(task.task_name), metrics=metrics, has_code=has_code)


def _data_problem(
    name: str, settings: Mapping[str, object], report: OnProgress, folders: Sequence[Path]
) -> Iterator[VexportError]:
    """Yield an error if the documents of a task cannot be downloaded.

    This runs for a task that cannot be loaded, so that all errors of the task are reported at once.
    If the documents are also the reason why the task cannot be loaded, the same error is yielded
    again. The caller removes duplicates.
    """
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.config.task import TaskConfig

    if not isinstance(settings.get("dataset_path"), str):
        return
    task = ConfigurableTask.__new__(ConfigurableTask)
    task._config = TaskConfig(task=name)
    task.DATASET_PATH, task.DATASET_NAME = settings["dataset_path"], settings.get("dataset_name")
    kwargs = settings.get("dataset_kwargs")
    try:
        with explained_downloads(report, 0, 1, folders):
            task.download(dict(kwargs) if isinstance(kwargs, Mapping) else None)
    except VexportError as error:
        yield error


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1:], SessionRequest, _fetched))
