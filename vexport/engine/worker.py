"""Run one model in vLLM in a separate process, and provide the basic functions of all workers.

The process starts the engine, describes it, calls a function that uses it, and tears it down. The
result file is written completely or not at all. A worker that dies leaves no result file.
`vexport/inference/engine_worker.py` is the program that runs this.
"""

import faulthandler
import gc
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Never, TypeVar

from pydantic import JsonValue, ValidationError

from vexport.engine.messages import (
    EngineFailure,
    FailureKind,
    InputProblem,
    SessionRequest,
    SessionResult,
)
from vexport.engine.process import PROGRESS_FD, one_line
from vexport.errors import InputError, VexportError
from vexport.errors.validation import requirement
from vexport.files import from_json, to_json, write_text
from vexport.records import OnProgress
from vexport.rules import engine as rules
from vexport.scenario.serve import EngineArguments

if TYPE_CHECKING:
    from vllm import LLM

T = TypeVar("T")
_MAX_MESSAGE = 1000
CPU = "cpu"
# Seconds that vLLM gets to raise an error after its core has ended.
_CORE_GRACE_SECONDS = 3
# Time limit for tearing down an engine after the result was written.
_TEARDOWN_SECONDS = 20
AskEngine = Callable[
    [EngineArguments, "LLM", SessionRequest, SessionResult, OnProgress], SessionResult
]
"""Function that receives an engine and the engine's arguments, and returns the result."""
CheckRequest = Callable[[EngineArguments, SessionRequest], None]
"""Function that raises a VexportError if the request cannot be run. No engine is started then."""
# Defaults of vLLM's arguments that differ between a CPU and a GPU. A CPU runs eager, because
# compiling takes longer than the few prompts and needs a C++ compiler. The engine reserves memory
# for `max_num_seqs` prompts at once.
_CPU_DEFAULTS: EngineArguments = {
    "enforce_eager": True,
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.85,
}
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_NODES = Path("/sys/devices/system/node")


def main(arguments: list[str], ask: AskEngine, check: CheckRequest) -> Never:
    """Read the request, call `check`, start the engine, call `ask`, write the result, and exit.

    The exit code is 0 if there is a result. The result may be a failure.
    """
    request_file, result_file = (Path(argument) for argument in arguments)
    exit_with_parent()
    with ExitStack() as engine:
        result = run(
            from_json(SessionRequest, request_file), progress_reporter(), ask, check, engine
        )
        write_text(result_file, to_json(result))
        # Teardown may crash, or wait for threads and devices forever. In this case the alarm ends
        # the process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_TEARDOWN_SECONDS)
    # A regular exit of Python would tear down all of vLLM, which takes seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_worker(arguments: list[str], kind: type[T], answer: Callable[[T], object]) -> int:
    """Read the request, write the result of `answer`, and return 0.

    This is the `main` of the other workers.
    """
    request_file, result_file = (Path(argument) for argument in arguments)
    exit_with_parent()
    write_text(result_file, to_json(answer(from_json(kind, request_file))))
    return 0


def exit_on_crash() -> None:
    """Make a crash end the process at once, with Python's stack in the log.

    vLLM imports tvm_ffi, which handles SIGSEGV with code that allocates memory
    (src/ffi/backtrace.cc). If the crash happens during an allocation, this code waits for the
    interrupted allocation, until the timeout ends the process.
    """
    faulthandler.disable()
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    faulthandler.enable()


def exit_with_core(llm: "LLM", engine: ExitStack) -> None:
    """Register the teardown of an engine with several processes.

    If the engine's core ends, this process ends as well.

    On a GPU the core is a separate process. vLLM notices when it ends (v1/engine/core_client.py,
    start_engine_core_monitor). However, a caller that waits for the core's results never returns.
    So this process ends soon after the core.
    """
    core, done = llm.llm_engine.engine_core, threading.Event()

    def watch() -> None:
        while not done.wait(1):
            if core.resources.engine_dead and not done.wait(_CORE_GRACE_SECONDS):
                codes = core.resources.engine_manager.finished_procs()
                print(
                    f"RuntimeError: the engine ended. Failed core proc(s): {codes}", file=sys.stderr
                )
                os._exit(1)

    is_process = hasattr(core, "resources")
    if is_process or llm.llm_engine.vllm_config.parallel_config.world_size > 1:
        engine.callback(core.shutdown)
    if is_process:
        engine.callback(done.set)
        threading.Thread(target=watch, daemon=True).start()


def run(
    request: SessionRequest,
    report: OnProgress,
    ask: AskEngine,
    check: CheckRequest,
    engine: ExitStack,
) -> SessionResult:
    """Call `check`, start an engine and pass it to `ask`.

    An exception is stored in the result and printed to the log.

    The caller closes `engine` to tear down the engine.
    """
    from vllm import __version__ as version
    from vllm.platforms import current_platform

    platform = str(current_platform.device_type)
    result = SessionResult(checkpoint=request.checkpoint, platform=platform, vllm=version)
    report("load", 0, 1)
    exit_on_crash()
    arguments = model_arguments(request, platform)
    try:
        check(arguments, request)
        start = time.monotonic()
        llm = build_engine(arguments, platform)
    except VexportError as error:
        return replace(result, problem=input_problem(error))
    except Exception as error:
        if (refusal := _refused_argument(error, request.arguments)) is not None:
            return replace(result, problem=input_problem(refusal))
        return replace(result, failure=_failure("refused", error))
    seconds = time.monotonic() - start
    exit_on_crash()
    exit_with_core(llm, engine)
    report("load", 1, 1)
    try:
        from vexport.engine.describe import describe

        described = describe(llm, request.arguments, start_seconds=seconds)
        return ask(arguments, llm, request, replace(result, engine=described), report)
    except VexportError as error:
        return replace(result, problem=input_problem(error))
    except Exception as error:
        return replace(result, failure=_failure("crashed", error))


def build_engine(arguments: EngineArguments, platform: str) -> "LLM":
    """Start vLLM's engine with these arguments. On a CPU, prepare the environment first."""
    from vllm import LLM

    if platform == CPU:
        prepare_cpu(arguments)
    # vLLM runs the garbage collector seven times when it starts. Excluding the imported modules
    # from it saves 1.6 s of CPU time.
    gc.freeze()
    return LLM(**arguments)


def model_arguments(request: SessionRequest, platform: str) -> EngineArguments:
    """Return the arguments of `vllm.LLM` for a request.

    Settings that the request does not contain get the platform's defaults.
    """
    arguments: dict[str, JsonValue] = {
        **(_CPU_DEFAULTS if platform == CPU else {}),
        "model": str(request.checkpoint),
        "dtype": "auto",
        "trust_remote_code": request.trust_remote_code,
        "seed": request.seed,
        "disable_log_stats": not request.drafted,
        # Responses must not depend on earlier prompts. With prefix caching, 20 of 64 responses
        # changed (docs/metrics.md).
        "enable_prefix_caching": False,
        "worker_extension_cls": "vexport.engine.describe.DescribeKernels",
    }
    if platform == CPU and (request.lm_eval.seeds > 1 or "seed" in request.lm_eval.gen_kwargs):
        # After a prefill in parts, vLLM rewinds a request's generator. A CPU generator cannot be
        # rewound ("CPU Generator does not use offset", v1/worker/gpu_model_runner.py).
        arguments["enable_chunked_prefill"] = False
    if request.max_model_len is not None:
        arguments["max_model_len"] = request.max_model_len
    if request.logprob_prompts:
        arguments["max_logprobs"] = -1
    if request.enforce_eager is not None:
        arguments["enforce_eager"] = request.enforce_eager
    return {**arguments, **request.arguments}


def _refused_argument(error: Exception, given: EngineArguments) -> InputError | None:
    """Return an error for the first given argument that vLLM's config classes refuse.

    Return None if vLLM refuses something else.
    """
    for detail in error.errors() if isinstance(error, ValidationError) else []:
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if name in given:
            need = requirement(detail)
            value = json.dumps(given[name])
            where = f"vLLM's argument {name}"
            refusal = InputError.of(rules.ARGUMENT, where, value=value, need=need)
            refusal.__cause__ = error
            return refusal
    return None


def _failure(kind: FailureKind, error: Exception) -> EngineFailure:
    traceback.print_exception(error)
    return EngineFailure(kind=kind, message=one_line(error)[:_MAX_MESSAGE], log_tail="")


def input_problem(error: VexportError) -> InputProblem:
    """Return a description of the error for the parent, which raises it again.

    The traceback is printed to the log.
    """
    traceback.print_exception(error)
    return InputProblem(
        exit_code=error.exit_code,
        where=error.where,
        got=error.got,
        need=error.need,
        fix=error.fix,
        rule=error.rule,
    )


def progress_reporter() -> OnProgress:
    """Return a function that writes progress as JSON lines to the descriptor that the parent named.

    If the parent named no descriptor, the function does nothing.
    """
    name = os.environ.pop(PROGRESS_FD, None)
    if name is None:
        return lambda stage, done, total: None
    descriptor = int(name)
    os.set_inheritable(descriptor, False)

    def report(stage: str, done: int, total: int) -> None:
        os.write(descriptor, json.dumps([stage, done, total]).encode() + b"\n")

    return report


def exit_with_parent() -> None:
    """Kill the whole process group as soon as the parent ends.

    The parent holds a pipe to this process's stdin. The pipe closes when the parent ends.
    """

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def prepare_cpu(arguments: EngineArguments) -> None:
    """Set the environment variables that the engine's processes read at their start.

    vLLM binds each rank to a NUMA node and refuses more ranks than nodes
    (utils/ompmultiprocessing.py). If there are more ranks than nodes, the ranks share the cores
    unbound, unless VLLM_CPU_OMP_THREADS_BIND names cores.

    The engine's core runs in this process. With a single rank, this process also does the rank's
    computation. The core gets a separate process only if there is a single rank and
    VLLM_CPU_OMP_THREADS_BIND names cores for it. Every further process imports vLLM, which takes
    10 s. vLLM limits a core's process to one thread unless OMP_NUM_THREADS is set
    (utils/torch_utils.py, set_torch_threads_for_runtime). It is set here, because a core in this
    process also does the computation.
    """
    if arguments.get("enforce_eager"):
        # vLLM compiles parts of its sampler even in eager mode. This takes 4 s at the first prompt,
        # and needs a compiler.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sizes = (arguments.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size"))
    ranks = math.prod(size for size in sizes if isinstance(size, int))
    binding = os.environ.get(_BINDING, "auto")
    if ranks > 1 or binding in ("auto", "nobind"):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if ranks > _nodes() and binding == "auto":
        os.environ[_BINDING] = binding = "nobind"
    if ranks == 1 or binding == "nobind":
        threads = len(os.sched_getaffinity(0)) // ranks
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))


def _nodes() -> int:
    return len(list(_NODES.glob("node[0-9]*"))) or 1
