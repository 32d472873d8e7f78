"""Check and download the tasks of an evaluation, and add them to a request.

All this happens before any engine starts.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from vexport.calibration.data import require_rows
from vexport.engine.messages import SessionRequest
from vexport.inference.options import EngineOptions
from vexport.inference.task_data import fetch_task_data, metrics_in_files
from vexport.inference.tasks import TaskMetrics, require_generating, resolve_tasks
from vexport.scenario import Evaluate
from vexport.scenario.evaluate import LmEvalSettings


def add_tasks(
    request: SessionRequest, settings: Evaluate, options: EngineOptions, folder: Path
) -> SessionRequest:
    """Return the request with lm-eval's tasks, if there are any. Their files go to `folder`."""
    if not settings.tasks:
        return request
    tasks = resolve_tasks(
        settings.tasks,
        folder=folder / "tasks",
        include_paths=settings.include_path,
        trust_remote_code=options.trust_remote_code,
    )
    return replace(
        request,
        tasks=tasks,
        include_paths=settings.include_path,
        batch_size=settings.batch_size,
        output=folder,
        seed=settings.seed,
    )


def require_tasks(settings: Evaluate, options: EngineOptions) -> tuple[TaskMetrics, ...] | None:
    """Return the metrics of the tasks, or None if a task is given by name.

    Only lm-eval can look up a name. Raises InputError, for all tasks at once, if a task or the text
    cannot be used.
    """
    if text := settings.held_out():
        require_rows(text)
    with _task_request(settings, options) as request:
        if settings.enable_thinking:
            require_generating(request.tasks)
        return metrics_in_files(request.tasks)


def fetch_tasks(settings: Evaluate, options: EngineOptions) -> tuple[TaskMetrics, ...]:
    """Download the tasks' documents into the cache, and return the tasks' metrics.

    Raises the errors of `fetch_task_data`.
    """
    if not settings.tasks:
        return ()
    with _task_request(settings, options) as request:
        return fetch_task_data(
            request,
            log=request.checkpoint / "fetch.log",
            timeout=options.serve.timeout,
            vllm_python=options.vllm_python,
            on_progress=options.on_progress,
        )


@contextmanager
def _task_request(settings: Evaluate, options: EngineOptions) -> Iterator[SessionRequest]:
    """Yield a request with only the tasks, and remove their files afterwards."""
    with tempfile.TemporaryDirectory(prefix="vexport-tasks-") as name:
        folder = Path(name)
        request = SessionRequest(
            checkpoint=folder,
            trust_remote_code=options.trust_remote_code,
            lm_eval=LmEvalSettings(enable_thinking=settings.enable_thinking),
        )
        yield add_tasks(request, settings, options, folder)
