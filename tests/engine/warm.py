"""Workers for tests: forks of a process that has done their imports.

An import of vLLM takes 10 s of a core, and most tests of the engine need it. A worker is forked
only if its environment equals the environment of the parent process. Variables that are read after
the imports may differ.
"""

import fcntl
import gc
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from runpy import run_module

from vexport.engine.cpu_emulation import SWITCH
from vexport.engine.process import PROGRESS_FD, Follow, started_process_group

DRY_WORKER = "vexport.engine.dry.worker"
KINDS = ("dry", "engine")
# Modules that every engine imports while it starts.
_ENGINE = (
    *(
        "transformers",
        "lm_eval.evaluator",
        "vexport.inference.lm_eval_runner",
        "vexport.inference.engine_model",
    ),
    *(
        "vexport.engine.cpu_emulation.kernels",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.core.sched.scheduler",
    ),
    *(
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.model_executor.layers.quantization.online.nvfp4",
    ),
    *("vllm.entrypoints.launchers.cli_args", "vllm.distributed.elastic_ep.elastic_execute"),
)
# Variables that a worker reads after its imports, and variables that imports set, depending on the
# order of tests.
LATE_VARIABLES = frozenset(
    {
        *("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_COMPILE_THREADS"),
        *("TILELANG_CLEANUP_TEMP_FILES", "TRITON_CACHE_AUTOTUNING"),
        *(PROGRESS_FD, SWITCH, "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TORCHDYNAMO_DISABLE"),
        *(
            "PYTEST_CURRENT_TEST",
            "PYTEST_XDIST_WORKER",
            "VEXPORT_NO_VERIFY",
            "COLUMNS",
            "NO_COLOR",
            "PWD",
        ),
        *(
            "KMP_DUPLICATE_LIB_OK",
            "KMP_INIT_AT_FORK",
            "AITER_SITUV2_A4W4",
            "HF_XET_HIGH_PERFORMANCE",
        ),
        *("LD_LIBRARY_PATH", "HF_HUB_DISABLE_PROGRESS_BARS", "VEXPORT_API_KEY"),
    }
)
_ROOT = Path(__file__).parents[2]
# Most bytes to receive at a time.
_BYTES = 1 << 20


class Warm:
    """Parent processes of workers, one for each set of imports.

    Test processes with the same folder share them. The first test process that needs a parent
    process starts it. The parent process ends after the last test process, when nobody holds its
    stdin open.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        for kind in KINDS:
            with suppress(FileExistsError):
                os.mkfifo(folder / f"{kind}.stdin")
        self.held = [os.open(folder / f"{kind}.stdin", os.O_RDWR) for kind in KINDS]

    @contextmanager
    def started_process_group(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, timeout: float
    ) -> Iterator[Follow]:
        """Start a process group like vexport.engine.process, with a client instead of a worker."""
        python, _, module, *arguments = command
        given = environment
        if module.startswith("tests."):
            environment = _with_tests(environment)
        ours = python == sys.executable and module.startswith(
            (
                "vexport.",
                "tests.judge.",
                "tests.scores.",
                "tests.inference.",
                "tests.engine.emulated",
            )
        )
        if ours and (address := self._address(module, given)):
            client = str(Path(__file__).with_name("warm_client.py"))
            command = [python, "-SE", client, PROGRESS_FD, address, module, *arguments]
        with started_process_group(
            command, environment=environment, log=log, timeout=timeout
        ) as follow:
            yield follow

    def _address(self, module: str, environment: Mapping[str, str]) -> str:
        """Return the parent process's address, or "" if its environment is different."""
        kind, early = (
            "dry" if module == DRY_WORKER else "engine",
            json.dumps(_early(environment), sort_keys=True),
        )
        address = self.folder / kind
        with (self.folder / f"{kind}.environment").open("a+") as started:
            fcntl.flock(started, fcntl.LOCK_EX)
            if not address.exists():
                started.write(early)
                started.flush()
                self._start(kind, {**_with_tests(environment), "TORCHDYNAMO_DISABLE": "1"})
            started.seek(0)
            return str(address) if started.read() == early else ""

    def _start(self, kind: str, environment: Mapping[str, str]) -> None:
        stdin = os.open(self.folder / f"{kind}.stdin", os.O_RDONLY)
        command = [sys.executable, "-m", "tests.engine.warm", kind, str(self.folder / kind)]
        process = subprocess.Popen(
            command, env=environment, stdin=stdin, stdout=subprocess.PIPE, start_new_session=True
        )
        os.close(stdin)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdout.close()
        process.returncode = 0  # not waited for: it may outlive this process

    def end(self) -> None:
        for descriptor in self.held:
            os.close(descriptor)


def _with_tests(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return an environment in which a worker finds the tests. It ignores the current folder."""
    path = [str(_ROOT), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in LATE_VARIABLES}


def server(kind: str, address: str) -> int:
    """Import, then fork a worker for each client until stdin closes.

    In a worker, return its exit code.
    """
    if kind == "dry":
        import_module(DRY_WORKER).preload()
    else:
        import_module("vllm").LLM  # noqa: B018
        for module in _ENGINE:
            import_module(module)
    # An engine collects garbage seven times during its start, which would copy all pages of this
    # process.
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        watched: list[int | socket.socket] = [0, listener]
        while 0 not in select.select(watched, [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return _supervise(connection)
            connection.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    os._exit(0)


def _supervise(connection: socket.socket) -> int:
    """Fork the worker and send its exit code to the client. In the worker, return the exit code."""
    data, descriptors, *_ = socket.recv_fds(connection, _BYTES, 3)
    while len(data) < 10 + int(data[:10]):
        data += connection.recv(_BYTES)
    (module, *arguments), environment, folder = json.loads(data[10:])
    worker = os.fork()
    if worker:
        for descriptor in (0, 1, 2, *descriptors):
            os.close(descriptor)
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])).encode())
        os._exit(0)
    connection.close()
    os.setsid()
    stdin, output, progress = descriptors
    for old, new in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    os.close(stdin)
    os.close(output)
    os.environ.clear()
    os.environ.update({**environment, PROGRESS_FD: str(progress)})
    os.chdir(folder)
    tempfile.tempdir = None
    sys.argv = [module, *arguments]
    main: Callable[[list[str]], int] | None = getattr(import_module(module), "main", None)
    if main is None:
        run_module(module, run_name="__main__")
        return 0
    return main(arguments)


if __name__ == "__main__":
    sys.exit(server(*sys.argv[1:]))
