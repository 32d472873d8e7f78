"""Start a worker process with vLLM's environment, and turn its failures into errors."""

import getpass
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from vexport.engine.cpu_emulation import SWITCH
from vexport.engine.messages import EngineFailure, InputProblem
from vexport.engine.process import Follow, failure_from_exit, log_tail, started_process_group
from vexport.errors import (
    EnvironmentFault,
    EnvironmentFaults,
    InputError,
    VexportError,
    error_kind,
    raise_all,
)
from vexport.errors.extras import require_extra
from vexport.files import from_json, to_json, write_text
from vexport.records import OnProgress
from vexport.rules import all_rules
from vexport.version import __version__

T = TypeVar("T")
# Turns torch.compile off. The variable is read when decorated functions are imported.
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
# Variables that vexport sets. They override the caller's environment.
_FIXED_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    # Without this, W4A16 would run with int8 activations on AMX machines:
    # kernels/linear/mixed_precision/cpu.py.
    "VLLM_CPU_INT4_W4A8": "0",
    SWITCH: "1",
    "NO_COLOR": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    # Keeps the current folder out of the import path of the worker and of vLLM's processes.
    "PYTHONSAFEPATH": "1",
}
# Disables the emulation of missing CPU kernels. It must not be registered for a fake device.
NO_EMULATION = {SWITCH: "0"}
# Defaults that the caller's environment overrides. The size of the KV cache is in whole GiB.
_DEFAULT_ENVIRONMENT = {
    # Waiting threads sleep soon. On shared cores, spinning threads would delay other threads.
    "GOMP_SPINCOUNT": "10000",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
# Longest path of the folder for temporary files, in bytes. A socket's path has at most 108 bytes.
# The name of a session's folder takes 25 of them, and vLLM's path within this folder takes 42.
_LONGEST_TEMPORARY = 40
# Time limit for checking whether an interpreter has vLLM.
_PROBE_SECONDS = 60.0
_PLUGIN = "[vllm.general_plugins]\nvexport_cpu_emulation = vexport.engine.cpu_emulation:register\n"


class EngineFault(EnvironmentFault):
    """vLLM is missing, crashed, ran out of memory or space, or took too long.

    `failure` contains the end of vLLM's log. `log` is the path of the whole log.
    """

    def __init__(self, where: str, failure: EngineFailure, log: Path | None = None) -> None:
        self.failure, self.log = failure, log
        rule = all_rules()[f"engine/{failure.kind.replace(' ', '-')}"]
        facts = {"message": failure.message}
        texts = rule.sentences(facts)
        fix = f"{texts.do} (log: {log})" if log else texts.do
        super().__init__(where, got=texts.got, need="", fix=fix, rule=rule.id, facts=facts)


@contextmanager
def log_folder(prefix: str) -> Iterator[Path]:
    """Yield a folder for the log of a session. It is kept only if an EngineFault names the log."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=_temporary_folder()))
    keep = False
    try:
        yield folder
    except EngineFault as fault:
        keep = fault.log is not None
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker(Generic[T]):
    """A process `python -m MODULE REQUEST RESULT` that writes a result of type `kind`.

    `where` names the worker in errors. Its output goes to `log`. Its environment is this process's
    environment, with the variables in `environment`. `vllm_python` is another interpreter that has
    vLLM, or None for the running interpreter.
    """

    module: str
    request: object
    kind: type[T]
    where: str
    log: Path
    timeout: float
    vllm_python: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, on_progress: OnProgress) -> T:
        """Start the worker and wait for its result. Raises the errors of `started`."""
        with self.started() as result:
            return result(on_progress)

    @contextmanager
    def started(self) -> Iterator[Callable[[OnProgress], T]]:
        """Start the worker. Yield a function that waits for its result.

        The process is gone when the context ends. Raises the errors of `require_vllm`, and
        EngineFault if the worker ends without a result, or `timeout` seconds after its start.
        """
        require_vllm(self.vllm_python)
        python = self.vllm_python or Path(sys.executable)
        with tempfile.TemporaryDirectory(
            prefix="vexport-session-", dir=_temporary_folder()
        ) as folder:
            scratch = Path(folder)
            request_file, result_file = scratch / "request.json", scratch / "result.json"
            write_text(request_file, to_json(self.request))
            packages = [_packages(scratch)] if self.vllm_python else []
            ours = {
                **_DEFAULT_ENVIRONMENT,
                **os.environ,
                **_FIXED_ENVIRONMENT,
                **_temporary_files(scratch),
                "PYTHONPATH": os.pathsep.join([*packages, *_python_path()]),
            }
            with started_process_group(
                [str(python), "-m", self.module, str(request_file), str(result_file)],
                environment={**ours, **self.environment},
                log=self.log,
                timeout=self.timeout,
            ) as follow:
                yield partial(self._result, follow, result_file)

    def _result(self, follow: Follow, result_file: Path, on_progress: OnProgress) -> T:
        try:
            code = follow(on_progress)
        except TimeoutError:
            message, tail = f"not finished after {self.timeout:g} s", log_tail(self.log)
            failure = EngineFailure(kind="timed out", message=message, log_tail=tail)
            raise EngineFault(self.where, failure, self.log) from None
        if not result_file.is_file():
            raise EngineFault(self.where, failure_from_exit(self.log, code), self.log)
        return from_json(self.kind, result_file)


def _temporary_files(scratch: Path) -> Mapping[str, str]:
    """Return the variables that set a worker's folder for temporary files.

    The folder is removed with the session.

    Each engine leaves sockets in it. torch's compiled code stays in the usual folder.
    """
    folder = scratch / "tmp"
    folder.mkdir()
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    return {
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
    }


def _temporary_folder() -> str:
    """Return the folder for temporary files.

    This is /tmp if the path of sockets in the usual folder would be too long.
    """
    folder = tempfile.gettempdir()
    return folder if len(folder) <= _LONGEST_TEMPORARY else "/tmp"


def session_error(problem: InputProblem) -> VexportError:
    """Return the error of a worker, so that this process can raise it."""
    kind, got, need, fix = error_kind(problem.exit_code), problem.got, problem.need, problem.fix
    return kind(problem.where, got=got, need=need, fix=fix, rule=problem.rule)


def raise_found_problems(problems: Sequence[InputProblem]) -> None:
    """Raise the problems that a worker found.

    Problems of the inputs are raised together. If there are none, faults of the environment
    are raised.
    """
    errors = [session_error(problem) for problem in problems]
    raise_all([error for error in errors if isinstance(error, InputError)])
    if errors:
        raise EnvironmentFaults(errors)


def require_vllm(vllm_python: Path | None = None) -> None:
    """Raise an error unless an interpreter has vLLM.

    Raises MissingPackage if the running interpreter lacks it, and EngineFault if `vllm_python`
    lacks it or does not start.
    """
    if vllm_python is None:
        require_extra("vllm", "vexport: loading a checkpoint")
        return
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    command, log = [str(vllm_python), "-c", probe], ""
    path = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(_python_path())}
    try:
        subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=_PROBE_SECONDS,
            env={**os.environ, **path},
        )
        return
    except subprocess.CalledProcessError as error:
        message, log = f"{vllm_python} has no module vllm", error.stderr
    except OSError as error:
        message = f"{vllm_python}: {error.strerror}"
    except subprocess.TimeoutExpired:
        message = f"{vllm_python} took more than {_PROBE_SECONDS:g} s to start"
    raise EngineFault(
        str(vllm_python), EngineFailure(kind="missing", message=message, log_tail=log)
    )


def require_engine(vllm_pythons: Sequence[Path | None]) -> None:
    """Raise an error unless vLLM and the packages of the reference are installed.

    Each interpreter in `vllm_pythons` needs vLLM. The running interpreter needs the
    reference's packages.

    Raises EngineFault and MissingPackage. Neither vLLM nor these packages are imported, because
    importing them takes seconds.
    """
    for python in vllm_pythons:
        require_vllm(python)
    for module in ("torch", "transformers", "compressed_tensors"):
        require_extra(module, "vexport: comparing with transformers")


def _packages(scratch: Path) -> str:
    """Return a folder in which another interpreter finds this vexport and its plugin.

    The folder contains no other packages of this environment.
    """
    shim = scratch / "packages"
    metadata = shim / f"vexport-{__version__}.dist-info"
    metadata.mkdir(parents=True)
    (shim / "vexport").symlink_to(Path(__file__).resolve().parent.parent, target_is_directory=True)
    write_text(
        metadata / "METADATA", f"Metadata-Version: 2.1\nName: vexport\nVersion: {__version__}\n"
    )
    write_text(metadata / "entry_points.txt", _PLUGIN)
    return str(shim)


def _python_path() -> list[str]:
    """Return the folders in PYTHONPATH, without empty entries.

    Python takes an empty entry, as in `PYTHONPATH=$PYTHONPATH:folder`, for the current folder.
    """
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
