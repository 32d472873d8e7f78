"""Which environment variables of vLLM are part of how a model was run."""

import pytest

from vexport.engine.generate import answer_environment
from vexport.records import Json
from vexport.run.serving import serve_digest


def test_variables_that_choose_kernels_are_named_and_no_others() -> None:
    others = {
        "VLLM_API_KEY": "secret",
        "VLLM_CPU_INT4_W4A8": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "/cache",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_USAGE_SOURCE": "production-docker-image",
        "PATH": "/bin",
    }
    assert answer_environment(others) == "none"
    chosen = {"VLLM_MARLIN_INPUT_DTYPE": "fp8", "VLLM_BATCH_INVARIANT": "1", "VLLM_DISABLED_KERNELS": "A,B"}
    told = "VLLM_BATCH_INVARIANT=1 VLLM_DISABLED_KERNELS=A,B VLLM_MARLIN_INPUT_DTYPE=fp8"
    assert answer_environment(chosen | others) == told


def test_another_engine_is_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    override: Json = {"linear": {"activation": "int8_per_group_32"}}
    digests = [serve_digest({}), serve_digest({"quantization_config": override})]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    digests += [serve_digest({}), serve_digest({"quantization_config": override})]
    assert len(set(digests)) == 4
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    assert serve_digest({}) == digests[0]
