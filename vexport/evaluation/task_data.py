"""The documents of tasks: fetched before any engine starts, and what to say where they cannot be had."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.checkpoint.hub import HubName, downloaded, explain, is_network_error, is_of_the_hub
from vexport.engine.messages import FoundProblems, SessionRequest
from vexport.engine.session import Worker, raise_found
from vexport.errors import InputError
from vexport.evaluation.tasks import FILE_FORMATS, has_other_metrics, is_local_dataset, reads_hub
from vexport.records import PROGRESS_DETAIL, OnProgress

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

STAGE = "task data"


def fetch_task_data(
    request: SessionRequest, *, log: Path, timeout: float, vllm_python: Path | None, on_progress: OnProgress
) -> None:
    """Bring the documents of `request.tasks` into the cache, with the lm-eval that will read them.

    Starts nothing where all data are local files and all metrics usual ones of lm-eval. InputError where a
    task, its dataset or metric is wrong, EnvironmentFault where network, token, disk or an offline variable
    is in the way.
    """
    if not any(reads_hub(task) or has_other_metrics(task) for task in request.tasks):
        return

    fetched = Worker(
        module="vexport.evaluation.task_data_worker",
        request=request,
        kind=FoundProblems,
        where=STAGE,
        log=log,
        timeout=timeout,
        vllm_python=vllm_python,
    ).run(on_progress)
    raise_found(fetched)


def _read_copy(
    task: "ConfigurableTask", copy: str, kwargs: Mapping[str, object] | None, read: Callable[..., None]
) -> None:
    """Read what `hf download` has brought: `datasets` itself finds only what it has read before."""
    name = task.DATASET_PATH
    task.DATASET_PATH = copy
    try:
        read(task, {key: value for key, value in (kwargs or {}).items() if key != "revision"})
    finally:
        task.DATASET_PATH = name


def _found(value: object, task: str, folders: Sequence[Path]) -> object:
    """Names of local files of documents as they are found: from here, else at or below the tasks' folders."""
    if isinstance(value, dict):
        return {name: _found(each, task, folders) for name, each in value.items()}
    if isinstance(value, list):
        return [_found(each, task, folders) for each in value]
    if not isinstance(value, str) or "*" in value or Path(value).exists():
        return value
    path = Path(value)
    if not path.is_absolute() and ".." not in path.parts:
        for folder in folders:
            for file in sorted(folder.rglob(value)):
                return str(file)
    raise InputError(
        f"task {task}: data_files",
        got=f"no file {value}",
        need="the task's documents, in this folder or next to its YAML file",
        fix="put them there, or correct the path",
    )


@contextmanager
def explained_downloads(
    on_progress: OnProgress, done: int, total: int, folders: Sequence[Path] = ()
) -> Iterator[None]:
    """Inside the block lm-eval's downloads are reported, and what goes wrong with the hub is our error.

    Local files are looked for at or below the tasks' `folders`, too.
    """
    from lm_eval.api import task as lm_eval_task

    cls = lm_eval_task.ConfigurableTask
    original = cls.download

    def download(self: "ConfigurableTask", dataset_kwargs: dict[str, object] | None = None) -> None:
        dataset = str(self.DATASET_PATH)
        on_progress(f"{STAGE}{PROGRESS_DETAIL}{dataset}", done, total)
        if dataset_kwargs and dataset in FILE_FORMATS and is_local_dataset(dataset, dataset_kwargs):
            files = _found(dataset_kwargs.get("data_files"), str(self.config.task), folders)
            dataset_kwargs = {**dataset_kwargs, "data_files": files}
        try:
            original(self, dataset_kwargs)
        except Exception as error:
            revision = (dataset_kwargs or {}).get("revision")
            name = HubName(id=dataset, revision=str(revision) if revision else None)
            if is_local_dataset(dataset, dataset_kwargs):
                raise
            if is_network_error(error) and (copy := downloaded(name)) is not None:
                _read_copy(self, copy, dataset_kwargs, original)
                return
            if is_of_the_hub(error):
                raise explain(error, name, "dataset") from error
            raise

    cls.download = download
    try:
        yield
    finally:
        cls.download = original
