"""Kinds of failures, read from logs as vLLM writes them."""

import venv
from pathlib import Path

import pytest

from tests.texts import assert_contains
from vexport.engine.messages import EngineFailure, FailureKind, SessionRequest
from vexport.engine.process import explain, failure_from_exit
from vexport.engine.session import EngineFault, Worker
from vexport.inference.engine_session import run_session
from vexport.records import silent

WRAPPER = (
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)
NO_COMPILER = (
    "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler "
    "found in ('g++',)"
)
NO_EXPERTS = "NotImplementedError: No Int8 MoE backend supports the deployment configuration"
NO_FP8_EXPERTS = "ValueError: Unsupported FP8 MoE backend: NONE"
LOG = """\
(EngineCore pid=9507) ERROR 11-20 22:18:48 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=9507) ERROR 11-20 22:18:48 [core.py:1512]     raise ValueError(
(EngineCore pid=9507) ERROR 11-20 22:18:48 [core.py:1512] {cause}
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
OLD_CPU = "NotImplementedError: FP8 KV cache on CPU requires x86 with AVX-512 or AMX."
NO_SPARSE = "NotImplementedError: Sparse Attention is not supported on CPU."
NO_SOFTCAP = "NotImplementedError: CPU_ATTN does not support logits softcap for FP8"
NO_KERNEL = "ValueError: Failed to find a kernel that can implement the WNA16 layer"


@pytest.mark.parametrize(
    ("cause", "platform", "kind"),
    [
        ("ValueError: For NVFP4 weights, input quantization must also be NVFP4", "cpu", "refused"),
        ("KeyError: 'layers.0.mlp.gate_up_proj.weight_foo'", "cuda", "refused"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "cuda", "out of memory"),
        (NO_COMPILER, "cpu", "no compiler"),
        ("RuntimeError: operator torchvision::nms does not exist", "cpu", "mismatched build"),
        (NO_KERNEL, "cpu", "unsupported"),
        (NO_KERNEL, "cuda", "refused"),
        (OLD_CPU, "cpu", "unsupported"),
        (NO_SPARSE, "cpu", "unsupported"),
        (NO_SOFTCAP, "cpu", "unsupported"),
        (f"{NO_EXPERTS} (weight_key=...).", "cpu", "unsupported"),
        (f"{NO_EXPERTS} (weight_key=...).", "cuda", "refused"),
        (NO_FP8_EXPERTS, "cpu", "unsupported"),
        ("RuntimeError: std::bad_alloc", "cpu", "out of memory"),
        ("RuntimeError: can't start new thread", "cpu", "out of memory"),
        ("ModuleNotFoundError: No module named 'flashinfer'", "cuda", "no package"),
        ("ImportError: libcudart.so.13: cannot open shared object file", "cuda", "no package"),
        ("OSError: [Errno 28] No space left on device: '/tmp/x'", "cpu", "no space"),
    ],
)
def test_root_cause_decides_kind(
    tmp_path: Path, cause: str, platform: str, kind: FailureKind
) -> None:
    log = tmp_path / "log"
    log.write_text(LOG.format(cause=cause))
    failure = explain(
        EngineFailure(kind="refused", message=WRAPPER, log_tail=""), log, platform=platform
    )
    assert (failure.kind, failure.message) == (kind, cause)
    assert failure.log_tail.endswith(WRAPPER)


def test_class_that_cannot_be_imported(tmp_path: Path) -> None:
    """vLLM imports a model's class in another process, and refuses the model if this fails."""
    cause = "ModuleNotFoundError: No module named 'torchvision'"
    refusal = (
        "ValueError: Model architectures ['LlavaForConditionalGeneration'] failed to be inspected."
    )
    log = tmp_path / "log"
    log.write_text(
        f"(MainProcess pid=9) ERROR 11-29 11:58:41 [registry.py:1108] {cause}\n{refusal}\n"
    )
    failure = explain(
        EngineFailure(kind="refused", message=refusal, log_tail=""), log, platform="cpu"
    )
    assert (failure.kind, failure.message) == ("no package", cause)


def test_assertions_and_signals_are_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        LOG.format(cause="    assert scheme == BLOCK\n           ^^^^^^^^^^^^^^^\nAssertionError")
    )
    failure = explain(
        EngineFailure(kind="refused", message=WRAPPER, log_tail=""), log, platform="cpu"
    )
    assert (failure.kind, failure.message) == ("refused", "AssertionError: assert scheme == BLOCK")
    assert failure_from_exit(tmp_path / "none", -9).kind == "out of memory"
    assert_contains(failure_from_exit(tmp_path / "none", -4).message, "signal 4", "SIGILL")


def test_interpreter_without_vllm(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
    request = SessionRequest(checkpoint=tmp_path)
    for python in (tmp_path / "bare" / "bin" / "python", tmp_path / "absent"):
        with pytest.raises(EngineFault) as caught:
            run_session(
                request, log=tmp_path / "log", timeout=60, vllm_python=python, on_progress=silent
            )
        assert caught.value.exit_code == 4
        assert caught.value.failure.kind == "missing"
        assert "python -m pip install vllm" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("signal", "crashed", "signal 11"),
        ("killed", "out of memory", "signal 9"),
        ("memory", "out of memory", "MemoryError"),
        ("exit", "crashed", "exit code 3"),
        ("sleep", "timed out", "not finished after 1 s"),
    ],
)
def test_dying_worker_is_named(tmp_path: Path, how: str, kind: FailureKind, words: str) -> None:
    with pytest.raises(EngineFault) as caught:
        Worker(
            module="tests.engine.dying",
            request={"how": how},
            kind=dict,
            where="here",
            log=tmp_path / "log",
            timeout=1 if how == "sleep" else 120,
            environment={"PYTHONPATH": str(Path(__file__).parents[2])},
        ).run(silent)
    assert caught.value.exit_code == 4
    assert caught.value.failure.kind == kind
    assert words in caught.value.failure.message
    assert f"about to die: {how}" in caught.value.failure.log_tail or how == "sleep"
