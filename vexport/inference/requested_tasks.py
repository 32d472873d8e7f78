"""Check and download the tasks of an evaluation, and add them to a request.

All this happens before any engine starts.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vexport.engine.messages import SessionRequest
from vexport.inference.options import EngineOptions
from vexport.inference.task_data import fetch_task_data
from vexport.inference.tasks import PreparedTasks, TaskMetrics, read_tasks
from vexport.scenario import Evaluate
from vexport.scenario.evaluate import LmEvalSettings


def prepare_tasks(settings: Evaluate, options: EngineOptions) -> PreparedTasks:
    """Read the tasks. Raises InputError, for all tasks at once, if a task cannot be used."""
    return read_tasks(
        settings.tasks,
        include_paths=settings.include_path,
        trust_remote_code=options.trust_remote_code,
        settings=settings,
    )


def add_tasks(
    request: SessionRequest, settings: Evaluate, options: EngineOptions, folder: Path
) -> SessionRequest:
    """Return the request with lm-eval's tasks, if there are any. Their files go to `folder`."""
    if not settings.tasks:
        return request
    return replace(
        request,
        tasks=prepare_tasks(settings, options).write(folder / "tasks"),
        include_paths=settings.include_path,
        batch_size=settings.batch_size,
        output=folder,
        seed=settings.seed,
    )


def fetch_tasks(
    prepared: PreparedTasks, settings: Evaluate, options: EngineOptions
) -> Sequence[TaskMetrics]:
    """Download the tasks' documents into the cache, and return the tasks' metrics.

    No worker starts if all data are local files and all metrics are standard metrics of lm-eval,
    unless `enable_thinking` is set: lm-eval then decides whether it fits each task.
    Raises the errors of `fetch_task_data`.
    """
    metrics = prepared.metrics
    needs_hub = any(file.reads_hub or file.has_other_metrics for file in prepared.files)
    if not prepared.tasks or (metrics and not needs_hub and not settings.enable_thinking):
        return metrics
    with tempfile.TemporaryDirectory(prefix="vexport-tasks-") as name:
        folder = Path(name)
        request = SessionRequest(
            checkpoint=folder,
            trust_remote_code=options.trust_remote_code,
            lm_eval=LmEvalSettings(enable_thinking=settings.enable_thinking),
            tasks=prepared.write(folder),
            include_paths=settings.include_path,
        )
        return fetch_task_data(
            request,
            log=folder / "fetch.log",
            timeout=options.serve.timeout,
            vllm_python=options.vllm_python,
            on_progress=options.on_progress,
        )
