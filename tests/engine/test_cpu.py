"""How many threads vLLM's CPU build computes on."""

import os

import pytest

from vexport.engine import worker
from vexport.engine.worker import prepare_cpu

NAMES = (
    "OMP_NUM_THREADS",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "TORCHDYNAMO_DISABLE",
)


@pytest.mark.parametrize(
    ("given", "ranks", "threads"),
    [
        ({}, 1, "8"),
        ({}, 2, "4"),
        ({}, 16, "1"),
        ({"OMP_NUM_THREADS": "3"}, 1, "3"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, 1, "8"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-1|2-3"}, 2, None),
    ],
)
def test_all_cores_compute_unless_the_caller_says_how_many(
    given: dict[str, str], ranks: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {name: value for name, value in os.environ.items() if name not in NAMES}
    monkeypatch.setattr(os, "environ", own | given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(worker, "_nodes", lambda: 1)
    prepare_cpu({"tensor_parallel_size": ranks})
    assert os.environ.get("OMP_NUM_THREADS") == threads
