"""What a task needs besides its documents: packages, metrics of the hub, data of NLTK. Worker only."""

import importlib.metadata
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from vexport.errors import EnvironmentFault, InputError

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

# What `evaluate` says of a metric that neither the hub nor the cache gives (evaluate/loading.py).
_METRIC = re.compile(r"Module '(?P<name>[\w/.-]+)' doesn't exist on the Hugging Face Hub either")
_EXTRA = re.compile(r"^(?P<package>[\w.-]+).*extra == ['\"](?P<extra>[\w.-]+)['\"]")


def allow_code(*, trust: bool) -> None:
    """Let metrics run code that a model wrote, where that is allowed: `evaluate` asks for this variable."""
    if trust:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"


def require_allowed(name: str, manager: "TaskManager", *, trust: bool) -> None:
    """InputError for a task of lm-eval that runs what the model wrote, without --trust-remote-code."""
    if task_settings(name, manager).get("unsafe_code") and not trust:
        got, fix = "it runs Python that the model writes", "add --trust-remote-code, best in a container"
        raise InputError(f"task {name}", got=got, need="", fix=fix)


def task_settings(name: str, manager: "TaskManager") -> Mapping[str, object]:
    """The YAML keys of a task that lm-eval knows by name; none of a file."""
    entry = manager.task_index.get(name)
    return (entry.cfg or {}) if entry is not None else {}


def missing(error: Exception, task: str) -> EnvironmentFault | None:
    """The fault of this installation behind an error of loading a task; None for another error."""
    where = f"task {task}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        fix = f"`pip install {_requirement(module)}`"
        return EnvironmentFault(where, got=f"no Python module {module}", need="it to score", fix=fix)
    metric = _METRIC.search(str(error)) if isinstance(error, FileNotFoundError) else None
    if metric is None:
        return None
    fix = (
        "load it once where the hub is reached, and copy the folder `modules` of HF_HOME from there: "
        f"`python -c \"import evaluate; evaluate.load('{metric['name']}')\"`"
    )
    got = f"no metric {metric['name']} of the hub in the cache"
    return EnvironmentFault(where, got=got, need="it, or the hub", fix=fix)


def nltk_problem(task: str, before: Collection[str]) -> Iterator[EnvironmentFault]:
    """The fault of a task that cuts text by NLTK's punkt_tab, where there is none; of modules not `before`.

    Without a network NLTK's own download fails silently, and the task when all answers are there.
    """
    new = [module for name, module in [*sys.modules.items()] if name not in before]
    if not any("download_nltk_resources" in vars(module) for module in new):  # hasattr imports lazy ones
        return
    try:
        sys.modules["nltk"].data.find("tokenizers/punkt_tab")
    except LookupError:
        fix = "fetch it where there is a network, and copy the folder nltk_data from there: "
        fix += "`python -m nltk.downloader punkt_tab`"
        yield EnvironmentFault(
            f"task {task}", got="no punkt_tab of NLTK", need="it to cut sentences", fix=fix
        )


def _requirement(module: str) -> str:
    """`'lm-eval[ifeval]'` where an extra of lm-eval has the module, else its own name."""
    for line in importlib.metadata.requires("lm_eval") or ():
        named = _EXTRA.match(line)
        if named and named["package"].replace("-", "_") == module:
            return f"'lm-eval[{named['extra']}]'"
    return module
