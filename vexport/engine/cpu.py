"""How vLLM's CPU build is started: what its defaults would not allow on a small machine."""

import math
import os
from pathlib import Path

from vexport.scenario.serve import EngineArguments

# The engine reserves room for this many prompts at once; more only costs memory on the CPU.
_MAX_SEQUENCES = 64
_MEMORY_UTILIZATION = 0.85
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_NODES = Path("/sys/devices/system/node")


def cpu_defaults() -> EngineArguments:
    """Arguments of vLLM that have other defaults here than on a GPU.

    Eager, as compiling takes longer than the few prompts and needs a C++ compiler.
    """
    return {
        "enforce_eager": True,
        "max_num_seqs": _MAX_SEQUENCES,
        "gpu_memory_utilization": _MEMORY_UTILIZATION,
    }


def prepare_cpu(arguments: EngineArguments) -> None:
    """Set the environment variables that the engine's processes read at their start.

    vLLM binds each rank to a NUMA node and refuses more ranks than nodes (utils/ompmultiprocessing.py).
    There the ranks share the cores unbound, unless VLLM_CPU_OMP_THREADS_BIND names cores.
    The engine's core runs in this process, and with it a single rank, unless cores are named for that one,
    which takes a process: every further process imports vLLM, 10 s each.
    The core's process would compute on one thread (utils/torch_utils.py, set_torch_threads_for_runtime)
    unless OMP_NUM_THREADS says otherwise: it is what computes here.
    """
    if arguments.get("enforce_eager"):
        # vLLM compiles parts of its sampler even so: 4 s at the first prompt, and it needs a compiler.
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
    """How many NUMA nodes the machine has; 1 where the kernel does not say."""
    return len(list(_NODES.glob("node[0-9]*"))) or 1
