"""Check the inputs of a run before an engine starts."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from vexport.checkpoint.index import require_checkpoint, require_weights_found
from vexport.checkpoint.source import require_source, resolve_source
from vexport.engine.arguments import require_heads, require_layers
from vexport.errors.extras import attempt_all
from vexport.inference.options import EngineOptions
from vexport.judge.task_settings import check_tasks, download_tasks
from vexport.names import HubName, ModelRef, ResultFiles, Server
from vexport.scenario import Evaluate, Serve


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
    *,
    downloads: bool,
    against: Path | None = None,
) -> None:
    """Raise InputErrors for tasks and models that cannot be used.

    The tasks are checked by `check_tasks`. vLLM must be able to serve the models with `serves`,
    except for results. A model on the hub must only exist: its config is downloaded, but not
    compared with the settings. With `downloads`, the tasks' documents are downloaded if all else
    is right.
    """
    models = [*dict.fromkeys(refs)]
    given = [ref.path for ref in models if isinstance(ref, ResultFiles)]
    tasks = partial(check_tasks, settings, options, against=against, given=given)
    checks: list[tuple[str, Callable[[], None]]] = [("tasks", tasks)]
    for ref in models:
        if not isinstance(ref, ResultFiles | Server):
            checks.append((str(ref), partial(_require_available, ref, serves)))
    attempt_all(checks)
    if downloads:
        download_tasks(settings, options, against=against)


def _require_available(ref: ModelRef, serves: Sequence[Serve]) -> None:
    if isinstance(ref, HubName):
        require_source(ref)
    else:
        require_servable(resolve_source(ref), serves)
