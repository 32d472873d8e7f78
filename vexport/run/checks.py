"""Check the inputs of a run before a download or an engine."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from vexport.checkpoint.index import require_checkpoint, require_weights_found
from vexport.checkpoint.source import require_source, resolve_source
from vexport.engine.arguments import require_heads, require_layers
from vexport.errors.extras import attempt_all
from vexport.inference.options import EngineOptions
from vexport.inference.requested_tasks import fetch_tasks, require_tasks
from vexport.inference.tasks import TaskMetrics
from vexport.judge.task_settings import require_valid_against, require_valid_settings
from vexport.names import HubName, ModelRef
from vexport.scenario import Evaluate, Serve
from vexport.scores.readers.accepted import read_accepted_table


def require_servable(root: Path, serves: Sequence[Serve]) -> None:
    """Raise InputError unless a folder is a checkpoint that vLLM can serve with these settings."""
    require_checkpoint(root)
    require_weights_found(root)
    require_layers(root)
    for serve in serves:
        require_heads(root, serve.ranks)


def require_tasks_and_models(
    settings: Evaluate,
    options: EngineOptions,
    refs: Iterable[ModelRef],
    serves: Sequence[Serve],
    accepted: Path | None = None,
) -> None:
    """Raise InputErrors for tasks and models that cannot be used.

    A margin or gate must fit the tasks, or the file of the accepted baseline. vLLM must be able to
    serve the models with `serves`. A model on the hub must only exist: its config is downloaded,
    but not compared with the settings.
    """

    checks: list[tuple[str, Callable[[], None]]] = [
        ("tasks", lambda: _require_fit(settings, require_tasks(settings, options), accepted))
    ]
    for ref in dict.fromkeys(refs):
        checks.append((str(ref), partial(_require_available, ref, serves)))
    attempt_all(checks)


def _require_available(ref: ModelRef, serves: Sequence[Serve]) -> None:
    if isinstance(ref, HubName):
        require_source(ref)
    else:
        require_servable(resolve_source(ref), serves)


def fetch_valid_tasks(
    settings: Evaluate, options: EngineOptions, accepted: Path | None = None
) -> None:
    """Download the tasks' documents. Raise InputError if a margin or gate does not fit them."""
    _require_fit(settings, fetch_tasks(settings, options), accepted)


def _require_fit(
    settings: Evaluate, tasks: Sequence[TaskMetrics] | None, accepted: Path | None
) -> None:
    if accepted is None:
        require_valid_settings(settings, tasks)
    else:
        require_valid_against(settings.margin, tasks, read_accepted_table(accepted))
