"""Environment variables that affect how a model runs, and the number of threads."""

import os

import pytest

from vexport.engine import worker
from vexport.engine.describe import kernel_environment
from vexport.engine.worker import prepare_cpu
from vexport.records import Json
from vexport.run.stages.serving import serve_digest


def test_variables_that_choose_kernels() -> None:
    others = {
        "VLLM_API_KEY": "secret",
        "VLLM_CPU_INT4_W4A8": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "/cache",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_USAGE_SOURCE": "production-docker-image",
        "PATH": "/bin",
    }
    assert kernel_environment(others) == "none"
    chosen = {
        "VLLM_MARLIN_INPUT_DTYPE": "fp8",
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_DISABLED_KERNELS": "A,B",
    }
    expected = "VLLM_BATCH_INVARIANT=1 VLLM_DISABLED_KERNELS=A,B VLLM_MARLIN_INPUT_DTYPE=fp8"
    assert kernel_environment(chosen | others) == expected


def test_engine_settings_change_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    override: Json = {"linear": {"activation": "int8_per_group_32"}}
    digests = [serve_digest({}), serve_digest({"quantization_config": override})]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    digests += [serve_digest({}), serve_digest({"quantization_config": override})]
    assert len(set(digests)) == 4
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    assert serve_digest({}) == digests[0]


REMOVED = (
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
def test_number_of_threads(
    given: dict[str, str], ranks: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cores compute, unless the environment sets a number of threads."""
    own = {name: value for name, value in os.environ.items() if name not in REMOVED}
    monkeypatch.setattr(os, "environ", own | given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(worker, "_nodes", lambda: 1)
    prepare_cpu({"tensor_parallel_size": ranks})
    assert os.environ.get("OMP_NUM_THREADS") == threads
